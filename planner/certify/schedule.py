"""The seconds of pipelined layers, chunk by chunk: the naive twin of `planner.pipeline` and `solvers.pipemoe`.

No closed form: every chunk's dispatch, experts and combine end when they end.

Legend: Q levels of a curve (low, middle, high), of a pass all pairs of the exchanges' with the experts'; B steps; L MoE
layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from ...traces.model import ModelSpec
from .figures import middle
from .pieces import Parts, Pass, buffered, share_of, whole
from .recount import Ledger, Moves
from .seconds import Clock

__all__ = ["Schedule", "Timed", "rows_of"]

Levels = NDArray[np.float64]
Pieces = tuple[Parts, ...]  # of every layer, one of its chunks
Chunk = tuple[dict[str, Levels], dict[str, NDArray[np.bool_]]]
STAGES = ("dispatch_s", "experts_s", "combine_s")


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds `[Q, B]` by metric, and by metric the share of calls outside the sizes measured."""

    seconds: dict[str, Levels]
    outside: dict[str, float]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A recount whose layers can be timed in any chunks.

    Parameters
    ----------
    clock
        What times a call.
    factor
        How many times as long as forward the experts compute backward.
    full_duplex
        Whether combines have a channel of their own.
    capacity_factor
        Where the rows of an expert are fixed, how many times the mean.
    """

    ledger: Ledger
    clock: Clock
    factor: float
    full_duplex: bool
    capacity_factor: float | None

    def timed(self, forward: Pass, backward: Pass | None) -> Timed:
        """Every metric of seconds in these chunks."""
        chunks = self._chunks(forward)
        once = {"attention_s": 1}
        seconds = {
            name: np.sum([found[name] for found, _ in chunks[: once.get(name)]], axis=(0, 3)) for name in chunks[0][0]
        }
        outside = {name: float(self._flagged(chunks, (name,)).mean()) for name in chunks[0][1]}
        passes = {"moe_s": forward, **({} if backward is None else {"moe_backward_s": backward})}
        for name, pieces in passes.items():
            seconds[name] = self.taken(pieces, back=name == "moe_backward_s").sum(axis=2)
            outside[name] = float(self._flagged(self._chunks(pieces), STAGES).mean())
        parts = [middle(seconds[name]) for name in ("attention_s", *passes) if name in seconds]
        seconds["step_s"] = np.sum(parts, axis=0)[None]
        return Timed(seconds, {name: share for name, share in outside.items() if share})

    def taken(self, pieces: Pass, *, back: bool) -> Levels:
        """Seconds of the forward or the backward pass of every layer, `[Q, B, L]`, at every pair of levels."""
        sent, computed, ended = np.zeros(()), np.zeros(()), np.zeros(())
        chunks = [self._paired(found, back=back) for found, _ in self._chunks(pieces)]
        if not self.full_duplex:  # the one channel is free once all dispatches are through
            ended = np.sum([first for first, _, _ in chunks], axis=0)
        for first, experts, last in chunks:
            sent = sent + first
            computed = np.maximum(computed, sent) + experts
            ended = np.maximum(ended, computed) + last
        return np.asarray(ended)

    def stages(self, pieces: Pass) -> list[tuple[Levels, Levels, Levels]]:
        """Seconds of every chunk's dispatch, experts and combine, `[Q, B, L]` each."""
        return [(found["dispatch_s"], found["experts_s"], found["combine_s"]) for found, _ in self._chunks(pieces)]

    def _paired(self, found: Mapping[str, Levels], *, back: bool) -> tuple[Levels, Levels, Levels]:
        """A chunk's first exchange, experts and last exchange at every pair of levels."""
        dispatch, experts, combine = found["dispatch_s"], found["experts_s"], found["combine_s"]
        pairs = [(exchange, expert) for exchange in range(len(dispatch)) for expert in range(len(experts))]
        at_exchange, at_expert = ([*column] for column in zip(*pairs, strict=True))
        exchanges = dispatch[at_exchange], combine[at_exchange]
        first, last = exchanges[::-1] if back else exchanges
        return first, (self.factor if back else 1.0) * experts[at_expert], last

    def _chunks(self, pieces: Pass) -> list[Chunk]:
        """The parts of a step in every chunk, and which of its calls were outside the sizes measured."""
        at, timed = cache(self._timed), []
        for chunk in zip_longest(*pieces, fillvalue=()):
            seconds, flags = at(chunk)
            calls = [at(call) for call in zip_longest(*([(x,) for x in parts] for parts in chunk), fillvalue=())]
            experts = np.sum([found["experts_s"] for found, _ in calls], axis=0)
            flagged = np.any([found["experts_s"] for _, found in calls], axis=0)
            timed.append(({**seconds, "experts_s": experts}, {**flags, "experts_s": flagged}))
        return timed

    def _timed(self, pieces: Pieces) -> Chunk:
        """These pieces of every layer at once, nothing where there is none."""
        there = np.array([share_of(parts) > 0 for parts in pieces])
        clock = replace(self.clock, sources={}, other_dtype=set(), outside={}, flags={})
        found = clock.layers(self._part(pieces), coherent=False)
        lasting = {name: levels if name == "attention_s" else levels * there for name, levels in found.items()}
        return lasting, {name: flag & (there | (name == "attention_s")) for name, flag in clock.flags.items()}

    def _part(self, pieces: Pieces) -> Ledger:
        """The ledger with so much of every layer's copies and pairs, in whole ones; or of every expert's rows."""
        moves, loads = self.ledger.moves, self.ledger.loads
        assert moves is not None
        if self.capacity_factor is None:
            ports = np.stack([whole(moves.ports[:, :, i], x) for i, x in enumerate(pieces)], axis=2)
            pairs = np.stack([whole(loads[:, i], x) for i, x in enumerate(pieces)], axis=1)
            return replace(self.ledger, moves=Moves(ports, moves.sitting), loads=pairs)
        model, cluster = self.clock.plan.model, self.clock.plan.cluster
        here, ports, pairs = model.num_experts // cluster.num_devices, np.zeros_like(moves.ports), np.zeros_like(loads)
        rows = rows_of(model, self.capacity_factor, moves.sitting[0].max(axis=2))
        for layer, parts in enumerate(pieces):
            sent = here * buffered(rows[:, layer], parts)
            ports[:, :, layer, 0] = (sent * (cluster.devices_per_node - 1))[:, None, None]
            ports[:, :, layer, 1] = (sent * (cluster.num_devices - cluster.devices_per_node))[:, None, None]
            pairs[:, layer] = (sent * cluster.num_devices)[:, None]
        return replace(self.ledger, moves=Moves(ports, moves.sitting), loads=pairs)

    def _flagged(self, chunks: list[Chunk], names: tuple[str, ...]) -> NDArray[np.bool_]:
        """Whether any such call of any chunk was outside the sizes measured, `[B, L]`."""
        found: NDArray[np.bool_] = np.any([flags[name] for _, flags in chunks for name in names], axis=0)
        return found


def rows_of(model: ModelSpec, factor: float, fullest: NDArray[np.int64]) -> NDArray[np.float64]:
    """Rows of an expert from one device under a fixed capacity, by the tokens of the fullest device."""
    rows: NDArray[np.float64] = np.floor(factor * np.ceil(fullest / model.num_experts)) * model.top_k
    return rows
