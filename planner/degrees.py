"""The pipeline degrees of every layer, chosen by what they take on the fitted steps.

By a method's name: "exact" takes the fewest seconds; "paper" is Algorithm 1 as printed; "robust" has the smallest
largest regret while the curves are at any level of their errors; "degree_1" is no pipeline; "one_degree" takes the
fewest seconds of those that all layers and passes share; "unequal" is exact with chunks of unequal shares where these
take fewer seconds. Algorithm 1 and the shares want lines t = a + b share; they are those of least relative error
through the curves at the shares 1/r that a chunk may have, and shares are then judged by the curves.

Legend: R degrees, 1 to the largest allowed; L MoE layers; S scenarios, the exchanges' curves at each level (low,
middle, high) with the experts' at each.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..profilers.fits.alpha_beta import AlphaBeta
from ..runtime.decisions import ChunkShares, PipelineDecision
from ..solvers.pipemoe import TUTEL_MAX_DEGREE, optimal_degree, robust_degree, tabulated_degrees, unequal_chunks
from .cut import Cut
from .pipelined import ChunkSeconds, Pipeline

__all__ = ["DegreeTable", "tabulated", "unequal"]

Seconds = NDArray[np.float64]
Shares = tuple[tuple[float, ...], ...]
LEAST_SHARE = 1e-6  # of a chunk; one below it is none


@dataclass(frozen=True, slots=True)
class DegreeTable:
    """What every degree of every layer takes, mean over steps.

    Parameters
    ----------
    forward, backward
        Seconds of a pass under every scenario, `[S, R, L]`; `backward` is zero without one.
    dispatch, experts
        Seconds of one chunk under the curves themselves, `[R, L]`.
    joint
        Whether one degree serves both passes.
    trains
        Whether there is a backward pass.
    capacity_factor
        As in `PipelineDecision`, of whose decisions it is a part.
    """

    forward: Seconds
    backward: Seconds
    dispatch: Seconds
    experts: Seconds
    joint: bool
    trains: bool
    capacity_factor: float | None

    def degrees(self, method: str) -> PipelineDecision:
        """The decision by a method's name, equal chunks all."""
        there, back = _middle(self.forward), _middle(self.backward)
        num_layers = there.shape[1]
        if method == "degree_1":
            return self._decision(np.ones(num_layers, np.int64))
        if method == "one_degree":
            return self._decision(np.full(num_layers, (there + back).sum(axis=1).argmin() + 1))
        if method == "paper":
            return self._decision(np.array([self._printed(layer) for layer in range(num_layers)]))
        if method == "robust" and self.joint:
            return self._decision(_robust(self.forward + self.backward))
        if method == "robust":
            return self._decision(_robust(self.forward), _robust(self.backward))
        best = tabulated_degrees(there, back)
        return self._decision(best.joint) if self.joint else self._decision(best.forward, best.backward)

    def seconds(self, degrees: PipelineDecision) -> float:
        """What the MoE layers of a step take in all passes."""
        layers = np.arange(self.forward.shape[2])
        taken = _middle(self.forward)[np.array(degrees.forward) - 1, layers].sum()
        if degrees.backward is not None:
            taken += _middle(self.backward)[np.array(degrees.backward) - 1, layers].sum()
        return float(taken)

    def line(self, layer: int) -> dict[str, Any]:
        """The lines through both curves of a layer over the share in a chunk, as `optimal_degree` takes them."""
        (a_a, b_a), (a_e, b_e) = _line(self.dispatch[:, layer]), _line(self.experts[:, layer])
        return {"a_a": a_a, "b_a": b_a, "a_e": a_e, "b_e": b_e, "n_d": 1.0, "n_e": 1.0}

    @property
    def tutel(self) -> tuple[int, ...]:
        """`a2a_ffn_overlap_degree` of every layer: the best that Tutel takes, which has one for both passes."""
        there, back = (_middle(one)[:TUTEL_MAX_DEGREE] for one in (self.forward, self.backward))
        return tuple(tabulated_degrees(there, back).joint.tolist())

    def _decision(self, forward: NDArray[np.int64], backward: NDArray[np.int64] | None = None) -> PipelineDecision:
        """The decision of these degrees; the same for both passes unless told."""
        back = (forward if backward is None else backward).tolist() if self.trains else None
        return PipelineDecision(forward=forward.tolist(), backward=back, capacity_factor=self.capacity_factor)

    def _printed(self, layer: int) -> int:
        return optimal_degree(**self.line(layer), max_degree=self.forward.shape[1], method="paper").forward


def tabulated(pipeline: Pipeline, max_degree: int, *, joint: bool) -> DegreeTable:
    """The table of all degrees up to `max_degree`, exact: every step at every degree."""
    cuts = [Cut.equal(degree, pipeline.model.num_layers) for degree in range(1, max_degree + 1)]
    trains = bool(pipeline.backward)
    rows = [_row(pipeline, pipeline.chunks(cut), trains=trains) for cut in cuts]
    forward, backward, dispatch, experts = (np.stack(column, axis=-2) for column in zip(*rows, strict=True))
    return DegreeTable(forward, backward, dispatch, experts, joint, trains, pipeline.capacity_factor)


def unequal(pipeline: Pipeline, table: DegreeTable) -> PipelineDecision:
    """The chunks of every layer in each pass: unequal where they take fewer seconds than the best equal ones."""
    exact = table.degrees("exact")
    forward = _pass_shares(pipeline, table, exact.forward, back=False)
    backward = None if exact.backward is None else _pass_shares(pipeline, table, exact.backward, back=True)
    return PipelineDecision(
        forward=tuple(map(len, forward)),
        backward=None if backward is None else tuple(map(len, backward)),
        shares=ChunkShares(forward=forward, backward=backward),
        capacity_factor=table.capacity_factor,
    )


def _row(pipeline: Pipeline, chunks: ChunkSeconds, *, trains: bool) -> tuple[Seconds, ...]:
    """Of one degree: forward and backward `[S, L]`, a chunk's dispatch and experts `[L]`."""
    forward = pipeline.taken(chunks)
    backward = pipeline.taken(chunks, back=True) if trains else np.zeros_like(forward)
    dispatch, experts, _ = (stage.seconds[0].mean(axis=0) for stage in chunks.stages)
    return forward, backward, dispatch, experts


def _pass_shares(pipeline: Pipeline, table: DegreeTable, degrees: tuple[int, ...], *, back: bool) -> Shares:
    """Those of one pass whose best equal chunks are `degrees`."""
    equal = _middle(table.backward if back else table.forward)
    factor = pipeline.backward if back else 1.0
    offered = [_offered(table.line(layer), factor, len(equal), pipeline.full_duplex) for layer in range(equal.shape[1])]
    chunks = pipeline.chunks(Cut.of(tuple(offered)))
    faster_L = _middle(pipeline.taken(chunks, back=back)) < equal.min(axis=0)
    alike = [(1 / degree,) * degree for degree in degrees]
    return tuple(offered[layer] if faster else alike[layer] for layer, faster in enumerate(faster_L))


def _offered(line: dict[str, Any], factor: float, most: int, full_duplex: bool) -> tuple[float, ...]:
    """The shares that are best under lines."""
    slower = line | {name: factor * line[name] for name in ("a_e", "b_e")}
    found = unequal_chunks(**slower, max_degree=most, full_duplex=full_duplex).shares
    kept = [share for share in found if share >= LEAST_SHARE]
    return tuple(share / sum(kept) for share in kept)


def _middle(seconds: Seconds) -> Seconds:
    """Of `[S, ...]`, those under the curves themselves."""
    middle: Seconds = seconds[len(seconds) // 2]
    return middle


def _robust(seconds_SRL: Seconds) -> NDArray[np.int64]:
    """The degree of every layer that is least wrong, `[L]`."""
    return np.array([robust_degree(seconds_SRL[:, :, layer]).degree for layer in range(seconds_SRL.shape[2])])


def _line(seconds_R: Seconds) -> tuple[float, float]:
    """Start-up and slope over the share of a layer in a chunk; zeros where a stage takes no time."""
    if not seconds_R.all():
        return 0.0, 0.0
    line = AlphaBeta.of(1 / np.arange(1.0, len(seconds_R) + 1), seconds_R)
    return line.a_s, line.b_s
