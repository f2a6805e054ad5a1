"""The seconds of pipelined layers, chunk by chunk: the naive twin of `planner.pipelined` and `solvers.pipemoe`.

No closed form: every chunk's dispatch, experts and combine end when they end.

Legend: Q levels of a curve (low, middle, high), of a pass all pairs of the exchanges' with the experts'; B steps; L MoE
layers.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .figures import middle
from .recount import Ledger, Moves
from .seconds import Clock

__all__ = ["Schedule", "Timed"]

Levels = NDArray[np.float64]
STAGES = ("dispatch_s", "experts_s", "combine_s")


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds `[Q, B]` by metric, and by metric the share of calls outside the sizes measured."""

    seconds: dict[str, Levels]
    outside: dict[str, float]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A recount whose layers can be timed at any degrees.

    Parameters
    ----------
    clock
        What times a call.
    factor
        How many times as long as forward the experts compute backward.
    full_duplex
        Whether combines have a channel of their own.
    """

    ledger: Ledger
    clock: Clock
    factor: float
    full_duplex: bool

    def timed(self, forward: tuple[int, ...], backward: tuple[int, ...] | None) -> Timed:
        """Every metric of seconds at these degrees."""
        stages, flags = self._chunk(forward)
        seconds = {
            name: (levels * (1 if name == "attention_s" else np.array(forward))).sum(axis=2)
            for name, levels in stages.items()
        }
        outside = {name: float(flag.mean()) for name, flag in flags.items()}
        passes = {"moe_s": forward, **({} if backward is None else {"moe_backward_s": backward})}
        for name, degrees in passes.items():
            seconds[name] = self.taken(degrees, back=name == "moe_backward_s").sum(axis=2)
            outside[name] = float(np.any([self._chunk(degrees)[1][stage] for stage in STAGES], axis=0).mean())
        parts = [middle(seconds[name]) for name in ("attention_s", *passes) if name in seconds]
        seconds["step_s"] = np.sum(parts, axis=0)[None]
        return Timed(seconds, {name: share for name, share in outside.items() if share})

    def taken(self, degrees: tuple[int, ...], *, back: bool) -> Levels:
        """Seconds of the forward or the backward pass of every layer, `[Q, B, L]`, at every pair of levels."""
        dispatch, experts, combine = self.stages(degrees)
        pairs = [(exchange, expert) for exchange in range(len(dispatch)) for expert in range(len(experts))]
        at_exchange, at_expert = zip(*pairs, strict=True)
        dispatch, experts, combine = dispatch[[*at_exchange]], experts[[*at_expert]], combine[[*at_exchange]]
        if back:
            return self._last_end(degrees, combine, self.factor * experts, dispatch)
        return self._last_end(degrees, dispatch, experts, combine)

    def stages(self, degrees: tuple[int, ...]) -> tuple[Levels, Levels, Levels]:
        """Seconds of one chunk's dispatch, experts and combine, `[Q, B, L]` each."""
        found, _ = self._chunk(degrees)
        return found["dispatch_s"], found["experts_s"], found["combine_s"]

    def _chunk(self, degrees: tuple[int, ...]) -> tuple[dict[str, Levels], dict[str, NDArray[np.bool_]]]:
        """The parts of a step with every layer's copies and pairs cut into as many chunks, the largest counting."""
        cut_L, moves = np.array(degrees), self.ledger.moves
        assert moves is not None
        ledger = replace(
            self.ledger,
            moves=Moves(np.ceil(moves.ports / cut_L[:, None, None, None]).astype(np.int64), moves.sitting),
            loads=np.ceil(self.ledger.loads / cut_L[:, None]).astype(np.int64),
        )
        clock = replace(self.clock, sources={}, other_dtype=set(), outside={}, flags={})
        return clock.layers(ledger, coherent=False), clock.flags

    def _last_end(self, degrees: tuple[int, ...], first: Levels, middle: Levels, last: Levels) -> Levels:
        """When the last chunk leaves the last stage: each waits for its chunk and for its predecessor."""
        cut_L = np.array(degrees)
        sent = first * cut_L
        computed, ended = np.zeros_like(first), np.zeros_like(first) if self.full_duplex else sent
        for chunk in range(1, max(degrees) + 1):
            computed_now = np.maximum(computed, chunk * first) + middle
            ended_now = np.maximum(ended, computed_now) + last
            computed, ended = (
                np.where(chunk <= cut_L, *pair) for pair in ((computed_now, computed), (ended_now, ended))
            )
        return ended
