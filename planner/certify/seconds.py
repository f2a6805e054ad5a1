"""Predicted seconds recounted: the naive twin of `planner.measures.speeds`, `.predicted` and `solvers.seconds`.

The profile's fitted curves are data and are evaluated as they stand; which of them times what, what each port carries
and which rank decides is worked out again.

Legend: Q levels of a curve (low, middle, high); B steps; L MoE layers; D devices.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...profilers.predictor import predicted
from ...profilers.profile import Profile
from ...profilers.series import Series
from ...runtime.plan import Plan
from ..options import SecondsOptions
from .certificate import Certificate
from .recount import Ledger, Moves
from .structure import slot_widths

__all__ = ["Clock"]

WIDTHS = {"fp8": 1, "fp8_block": 1, "uint8": 1, "int8": 1, "bf16": 2, "fp16": 2, "fp32": 4}  # bytes, best first
PLACE = {"intra": 0, "inter": 1}
Levels = NDArray[np.float64]


@dataclass(slots=True)
class Clock:
    """Times a recount by a profile and the links of a plan's cluster.

    Parameters
    ----------
    samples
        Whether the trace has samples.
    sources
        What times each part, as far as it was asked.
    other_dtype
        Those of these parts whose series has elements of another width than the model.
    outside
        Metric to the share of calls outside the sizes measured, one a ledger.
    flags
        Metric to whether each call of the last ledger was outside, `[B, L]`.
    """

    plan: Plan
    profile: Profile | None
    samples: bool
    sources: dict[str, str] = field(default_factory=dict)
    other_dtype: set[str] = field(default_factory=set)
    outside: dict[str, list[float]] = field(default_factory=dict)
    flags: dict[str, NDArray[np.bool_]] = field(default_factory=dict)

    def seconds(self, ledger: Ledger, *, coherent: bool) -> dict[str, Levels]:
        """Every metric of seconds that can be told, `[Q, B]`."""
        found = {name: levels.sum(axis=2) for name, levels in self.layers(ledger, coherent=coherent).items()}
        needed = {"dispatch_s", "combine_s", "experts_s"} | ({"kv_s"} if coherent else set())
        if needed <= found.keys():
            found["step_s"] = sum((found[name] for name in {*needed, "attention_s"} & found.keys()), np.zeros(()))
        return found

    def layers(self, ledger: Ledger, *, coherent: bool) -> dict[str, Levels]:
        """Every part of a step that can be timed, layer by layer, `[Q, B, L]`."""
        model, moved, found = self.plan.model, ledger.moves, dict[str, Levels]()
        if moved is None:  # counts do not say where tokens are
            return self._experts(ledger)
        if model.hidden_size and model.dtype_bytes:
            size = model.hidden_size * model.dtype_bytes
            moves = [("dispatch", moved.ports[0] * size), ("combine", moved.ports[1] * size)]
            found |= self._links("dispatch", "all_to_all", moves, never=coherent and model.top_k == 1)
        if model.attention.kv_size and model.dtype_bytes:
            size = model.attention.kv_size * model.dtype_bytes
            moves = [("kv", self._gathered(moved) * size)] if coherent else []
            found |= self._links("kv", "all_gather", moves)
        return found | self._experts(ledger) | self._attention(moved)

    def check_options(self, claimed: SecondsOptions, certificate: Certificate) -> None:
        """Refuse a plan that names other curves than those that time it, or hides where they were stretched.

        What is missing follows: `check_timing` has held sources and missing parts against each other.
        """
        if claimed.sources != self.sources:
            raise CertificationError(
                f"options.seconds: timed by {dict(claimed.sources)}; profile and links give {self.sources}"
            )
        if set(claimed.other_dtype) != self.other_dtype:
            raise CertificationError(
                f"options.seconds: in another dtype {list(claimed.other_dtype)}, not {sorted(self.other_dtype)}"
            )
        stretched = {name: max(shares) for name, shares in self.outside.items() if max(shares)}
        if claimed.extrapolated.keys() != stretched.keys():
            raise CertificationError(
                f"options.seconds: extrapolated {sorted(claimed.extrapolated)}, not {sorted(stretched)}"
            )
        for name, share in stretched.items():
            certificate.agree(f"extrapolated {name}", claimed.extrapolated[name], share)

    def _links(
        self, part: str, case: str, moves: list[tuple[str, NDArray[np.int64]]], *, never: bool = False
    ) -> dict[str, Levels]:
        """What crosses links: bytes by class, direction and device `[B, L, 2, 2, D]` each; the slowest class counts."""
        cluster = self.plan.cluster
        spans = {"intra": cluster.devices_per_node, "inter": cluster.num_nodes}
        ranks = {"intra": cluster.devices_per_node, "inter": cluster.num_devices}
        there = [link for link, span in spans.items() if span > 1]
        series = {link: self._series(case, ranks[link], link) for link in there}
        if any(series[link] is None and link not in cluster.links for link in there):
            return {}
        for link in there:
            self._name(f"{part} {link}", series[link], link)
        found: dict[str, Levels] = {}
        for name, bytes_BL in moves:
            if never and name == "combine":
                nothing = np.zeros((3, *bytes_BL.shape[:2]))
                found |= {f"{name}_s": nothing} | {f"{name}_{link}_s": nothing for link in there if len(there) > 1}
                continue
            worst, outside = [], np.zeros(bytes_BL.shape[:2], dtype=bool)
            for link in there:
                port = bytes_BL[:, :, PLACE[link]].max(axis=(2, 3)).astype(float)
                times, flags = self._call(series[link], link, port, spans[link])
                worst.append(times)
                outside |= flags
                if len(there) > 1:
                    found[f"{name}_{link}_s"] = times
            found[f"{name}_s"] = np.max(worst, axis=0)
            self._flag(f"{name}_s", outside)
        return found

    def _name(self, key: str, series: Series | None, link: str) -> None:
        self.sources[key] = f"link {link}" if series is None else series.key

    def _compare_width(self, part: str, series: Series) -> None:
        if WIDTHS.get(series.dtype) != self.plan.model.dtype_bytes:
            self.other_dtype.add(part)

    def _call(self, series: Series | None, link: str, port: Levels, span: int) -> tuple[Levels, NDArray[np.bool_]]:
        if series is None:
            line = self.plan.cluster.links[link]
            return np.stack([line.latency_s + line.s_per_byte * port] * 3), np.zeros(port.shape, dtype=bool)
        blocks = np.ceil(np.maximum(port, 1.0) * span / (span - 1) / series.ranks)
        return self._levels(series, {"bytes": blocks * series.ranks})

    def _gathered(self, moves: Moves) -> NDArray[np.int64]:
        """Tokens whose K and V a device sends (0) and receives (1) by class, `[B, L, 2, 2, D]`."""
        held, group = moves.sitting[0], self.plan.cluster.devices_per_node
        size = held.shape[2]
        near_DD = (np.arange(size)[:, None] // group == np.arange(size) // group) & ~np.eye(size, dtype=bool)
        far_DD = np.arange(size)[:, None] // group != np.arange(size) // group
        classes = [[held * near.sum(axis=1), held @ near.astype(np.int64)] for near in (near_DD, far_DD)]
        return np.array(classes).transpose(2, 3, 0, 1, 4)

    def _experts(self, ledger: Ledger) -> dict[str, Levels]:
        model, series = self.plan.model, self._series("expert_ffn", 1, None)
        if series is None or series.fit is None or model.hidden_size is None or model.ffn_size is None:
            return {}
        self._name("experts", series, "")
        self._compare_width("experts", series)
        widths = np.array(slot_widths(self.plan))
        grouped = series.fit.measured.get("grouped", (0, 0))[0]
        alike = {"hidden": model.hidden_size, "ffn": model.ffn_size, "grouped": grouped}
        rounds, outside = [], np.zeros(ledger.loads.shape[:2], dtype=bool)
        for width in {int(one) for one in widths if one}:
            most = ledger.loads[:, :, widths == width].max(axis=2)
            sizes = {"tokens": np.maximum(most, 1).astype(float), "experts": np.full(most.shape, float(width))}
            times, flags = self._levels(series, sizes | {k: np.full(most.shape, float(v)) for k, v in alike.items()})
            rounds.append(np.where(most > 0, times, 0.0))
            outside |= flags & (most > 0)
        self._flag("experts_s", outside)
        return {"experts_s": np.max(rounds, axis=0)}

    def _attention(self, moves: Moves) -> dict[str, Levels]:
        series, hidden = self._series("attention", 1, None), self.plan.model.hidden_size
        if series is None or hidden is None or not self.samples:
            return {}
        self._name("attention", series, "")
        self._compare_width("attention", series)
        if self.plan.model.attention.kv_size != 2 * hidden:
            self.sources["attention"] += " (as MHA)"
        held, pairs = (np.maximum(one, 1).astype(float) for one in moves.sitting)
        sizes = {"batch": held**2 / pairs, "length": pairs / held, "hidden": np.full(held.shape, float(hidden))}
        times, flags = self._levels(series, sizes)
        busy = moves.sitting[0] > 0
        self._flag("attention_s", (flags & busy).any(axis=2))
        return {"attention_s": np.where(busy, times, 0.0).max(axis=3)}

    def _series(self, case: str, ranks: int, link: str | None) -> Series | None:
        """The fitted series of a case: as wide as the model's elements, in the order of `WIDTHS`, then by key."""
        order = list(WIDTHS)
        best: tuple[tuple[int, str], Series] | None = None
        for key, series in sorted(self.profile.series.items() if self.profile else ()):
            if (series.case, series.ranks, series.link) != (case, ranks, link) or series.fit is None:
                continue
            fits = series.dtype in WIDTHS and WIDTHS[series.dtype] == self.plan.model.dtype_bytes
            rank = (order.index(series.dtype) if fits else len(order), key)
            best = (rank, series) if best is None or rank < best[0] else best
        return None if best is None else best[1]

    def _levels(self, series: Series, sizes: dict[str, Levels]) -> tuple[Levels, NDArray[np.bool_]]:
        found = predicted(series, sizes)
        return np.stack([found.low, found.seconds, found.high]), found.extrapolated

    def _flag(self, metric: str, flags: NDArray[np.bool_]) -> None:
        self.flags[metric] = flags
        self.outside.setdefault(metric, []).append(float(flags.mean()))
