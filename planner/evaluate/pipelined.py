"""The seconds of a tally's MoE layers, cut into chunks whose exchanges and experts overlap.

A chunk is a share of every device's tokens, in whole tokens, so the busiest port and the busiest device of a layer stay
so in each of its chunks, and decide how long that takes; under a fixed capacity, of every expert's rows, padded to a
multiple of the pieces. `dispatch_s`, `experts_s` and `combine_s` are how long a stage is busy; stages overlap, and a
pass takes `moe_s` or `moe_backward_s`.

Legend: B steps; L MoE layers; C chunks of a cut; D devices; Q levels of a source's curves (low, middle, high).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ...profilers.fits.fit import Prediction
from ...solvers.ports import link_classes
from ...solvers.seconds import exchange_seconds, expert_seconds, slowest
from ...traces.model import ModelSpec
from .chunks import Cut, Cuts
from .scene import Passes, Scene
from .tally import Tally

__all__ = ["ChunkSeconds", "Pipeline", "by_class", "capacity"]

Stages = tuple[Prediction, Prediction, Prediction]


@dataclass(frozen=True, slots=True)
class ChunkSeconds:
    """Seconds of the chunks of a cut in their three stages, `[C, B, L]`; the exchanges one a link class, too."""

    cut: Cut
    dispatch_by_class: list[Prediction]
    experts: Prediction
    combine_by_class: list[Prediction]

    @property
    def stages(self) -> Stages:
        """Dispatch, experts, combine."""
        return slowest(self.dispatch_by_class), self.experts, slowest(self.combine_by_class)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Time model of a tally's layers at any cuts; the scene has curves of exchanges and experts.

    Parameters
    ----------
    capacity_factor
        Every expert has a buffer of that many times the mean rows from each device, all of it sent and computed
        whether used or not (`capacity`); None: what is routed is sent.
    """

    tally: Tally
    scene: Scene
    passes: Passes
    capacity_factor: float | None = None

    def priced(self, cuts: Cuts, *, combines: bool = True) -> tuple[dict[str, Prediction], NDArray[np.float64]]:
        """The seconds of stages and passes by metric `[B, L]`, and of all passes under every pair of levels `[Q Q, B]`.

        Parameters
        ----------
        combines
            Whether anything is combined; not where tokens live next where their expert is.
        """
        chunks = self.chunks(cuts.forward)
        if not combines:
            chunks = replace(chunks, combine_by_class=[_times(0.0, part) for part in chunks.combine_by_class])
        busy, layers = cuts.forward.busy, dict[str, Prediction]()
        for name, parts in (("dispatch", chunks.dispatch_by_class), ("combine", chunks.combine_by_class)):
            layers |= by_class(name, [_over_chunks(busy, part) for part in parts], self.scene.cluster)
        layers["experts_s"] = _over_chunks(busy, chunks.experts)
        passes = {"moe_s": (cuts.forward, chunks.stages)}
        if cuts.backward is not None:
            passes["moe_backward_s"] = (cuts.backward, self._reversed(self.chunks(cuts.backward)))
        layers |= {name: self._pass(*one) for name, one in passes.items()}
        crossed_QB: NDArray[np.float64] = np.sum([self._crossed(*one).sum(axis=2) for one in passes.values()], axis=0)
        return layers, crossed_QB

    def chunks(self, cut: Cut) -> ChunkSeconds:
        """The seconds of the chunks that every layer is cut into."""
        costs, copy_bytes = self.scene.costs, self.scene.model.copy_bytes
        assert costs is not None
        assert costs.exchange is not None
        assert costs.experts is not None
        assert copy_bytes is not None
        dispatches, calls, combines = zip(*self._work(cut), strict=True)
        exchanges = [
            [exchange_seconds(copies, copy_bytes, costs.exchange) for copies in chunks]
            for chunks in (dispatches, combines)
        ]
        experts = [_times(cut.calls, expert_seconds(pairs, self.tally.slots, costs.experts)) for pairs in calls]
        dispatch, combine = ([_stacked(cut, link) for link in zip(*chunks, strict=True)] for chunks in exchanges)
        return ChunkSeconds(cut, dispatch, _stacked(cut, experts), combine)

    def taken(self, chunks: ChunkSeconds, *, back: bool = False) -> NDArray[np.float64]:
        """Seconds of the forward or the backward pass, mean over steps, `[Q Q, L]`, the curves themselves midmost.

        Exchanges are at each level with experts at each.
        """
        stages = self._reversed(chunks) if back else chunks.stages
        mean_QL: NDArray[np.float64] = self._crossed(chunks.cut, stages).mean(axis=1)
        return mean_QL

    def both(self, cuts: Cuts) -> NDArray[np.float64]:
        """Seconds of all passes under the curves themselves, mean over steps, `[L]`."""
        passes = [self.taken(self.chunks(cuts.forward))]
        if cuts.backward is not None:
            passes.append(self.taken(self.chunks(cuts.backward), back=True))
        taken_QL = np.sum(passes, axis=0)
        middle_L: NDArray[np.float64] = taken_QL[len(taken_QL) // 2]
        return middle_L

    def _work(self, cut: Cut) -> Sequence[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """Work per chunk: copies of dispatch, pairs per call of experts, copies of combine, as in `solvers.seconds`."""
        ports, slots_D, group = self.tally.ports, self.tally.slots, self.scene.cluster.devices_per_node
        assert ports is not None
        if self.capacity_factor is None:
            busiest = (one.max(axis=(3, 4), keepdims=True) for one in (ports.dispatch, ports.combine))
            dispatch, combine = map(cut.parts, busiest)
            return [*zip(dispatch, cut.parts(self.tally.loads, cut.calls), combine, strict=True)]
        peers = {"intra": group - 1, "inter": len(slots_D) - group}
        slots_C = slots_D[0] * np.array([peers[link] for link in link_classes(self.scene.cluster)])
        rows = cut.padded_sizes(capacity(self.tally, self.scene.model, self.capacity_factor))
        copies = [(one[:, :, None] * slots_C)[..., None, None] for one in rows]
        pairs = [(one // cut.calls)[:, :, None] * slots_D * len(slots_D) for one in rows]
        return [*zip(copies, pairs, copies, strict=True)]

    def _reversed(self, chunks: ChunkSeconds) -> Stages:
        """Gradients go back through the combine, the experts, `backward` times as long, and the dispatch."""
        dispatch, experts, combine = chunks.stages
        return combine, _times(self.passes.backward, experts), dispatch

    def _pass(self, cut: Cut, stages: Stages) -> Prediction:
        return _over_chunks(lambda *stage: cut.taken(*stage, full_duplex=self.passes.full_duplex), *stages)

    def _crossed(self, cut: Cut, stages: Stages) -> NDArray[np.float64]:
        """Seconds of a pass, exchanges at each level with experts at each, `[Q Q, B, L]`."""
        first, middle, last = (np.stack([one.low, one.seconds, one.high]) for one in stages)
        found = cut.taken(first[:, None], middle[None], last[:, None], full_duplex=self.passes.full_duplex)
        return found.reshape(-1, *found.shape[2:])


def capacity(tally: Tally, model: ModelSpec, factor: float) -> NDArray[np.int64]:
    """Rows of an expert from one device, `[B, L]`, where the capacity is fixed.

    Notes
    -----
    As Tutel has it (`extract_critical` in tutel/impls/fast_dispatch.py): K int(F ceil(T / E)), T the tokens of the
    fullest device, E experts, K a token.
    """
    assert tally.ports is not None
    mean_BL = -(-tally.ports.tokens.max(axis=2) // model.num_experts)
    rows_BL = np.floor(factor * mean_BL).astype(np.int64)
    return np.broadcast_to(model.top_k * rows_BL, tally.loads.shape[:2])


def by_class(name: str, seconds: list[Prediction], cluster: Cluster) -> dict[str, Prediction]:
    """A part that crosses links: `{name}_s`, the slowest class, and each class alone where there are two."""
    found = {f"{name}_s": slowest(seconds)}
    if len(seconds) > 1:
        found |= {f"{name}_{link}_s": part for link, part in zip(link_classes(cluster), seconds, strict=True)}
    return found


def _times(factor: float | NDArray[Any], one: Prediction) -> Prediction:
    return Prediction(factor * one.seconds, factor * one.low, factor * one.high, one.extrapolated)


def _stacked(cut: Cut, chunks: Sequence[Prediction]) -> Prediction:
    """The seconds of chunks as one, `[C, B, L]`, nothing where a layer has no such chunk."""
    columns = ([getattr(one, name) for one in chunks] for name in ("seconds", "low", "high", "extrapolated"))
    seconds, low, high, extrapolated = (cut.present(np.stack(column)) for column in columns)
    return Prediction(seconds, low, high, extrapolated.astype(bool))


def _over_chunks(how: Callable[..., NDArray[np.float64]], *parts: Prediction) -> Prediction:
    """`how` of parts `[C, B, L]` at every level, `[B, L]`; it grows with each of them."""
    return Prediction(
        seconds=how(*(part.seconds for part in parts)),
        low=how(*(part.low for part in parts)),
        high=how(*(part.high for part in parts)),
        extrapolated=np.asarray(np.any([part.extrapolated for part in parts], axis=(0, 1))),
    )
