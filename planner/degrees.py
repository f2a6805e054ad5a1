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
from ..runtime.decisions import PipelineDecision
from ..solvers.pipemoe import TUTEL_MAX_DEGREE, optimal_degree, robust_degree, unequal_chunks
from .cut import Cut
from .options import ChunkShares
from .pipelined import Pipeline

__all__ = ["DegreeTable", "tabulated", "unequal_shares"]

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
    """

    forward: Seconds
    backward: Seconds
    dispatch: Seconds
    experts: Seconds
    joint: bool
    trains: bool

    def degrees(self, method: str) -> PipelineDecision:
        """The degrees by a method's name, equal chunks all."""
        there, back = _middle(self.forward), _middle(self.backward)
        num_layers = there.shape[1]
        if method == "degree_1":
            return self._decision(np.ones(num_layers, np.int64))
        if method == "one_degree":
            return self._decision(np.full(num_layers, (there + back).sum(axis=1).argmin() + 1))
        if method == "paper":
            return self._decision(np.array([self._printed(layer) for layer in range(num_layers)]))
        choose = _robust if method == "robust" else _fastest
        if self.joint:
            return self._decision(choose(self.forward + self.backward))
        return self._decision(choose(self.forward), choose(self.backward))

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
        return tuple(_fastest((self.forward + self.backward)[:, :TUTEL_MAX_DEGREE]).tolist())

    def _decision(self, forward: NDArray[np.int64], backward: NDArray[np.int64] | None = None) -> PipelineDecision:
        """The decision of these degrees; the same for both passes unless told."""
        back = forward if backward is None else backward
        return PipelineDecision(forward=forward.tolist(), backward=back.tolist() if self.trains else None)

    def _printed(self, layer: int) -> int:
        return optimal_degree(**self.line(layer), max_degree=self.forward.shape[1], method="paper").forward


def tabulated(pipeline: Pipeline, max_degree: int, *, joint: bool) -> DegreeTable:
    """The table of all degrees up to `max_degree`, exact: every step at every degree."""
    cuts = [Cut.equal(degree, pipeline.model.num_layers) for degree in range(1, max_degree + 1)]
    forward = np.stack([pipeline.taken(cut) for cut in cuts], axis=1)
    backward = np.zeros_like(forward)
    if pipeline.backward:
        backward = np.stack([pipeline.taken(cut, back=True) for cut in cuts], axis=1)
    stages = [pipeline.chunks(cut).stages for cut in cuts]
    dispatch, experts = (np.array([stage[i].seconds[0].mean(axis=0) for stage in stages]) for i in (0, 1))
    return DegreeTable(forward, backward, dispatch, experts, joint, bool(pipeline.backward))


def unequal_shares(pipeline: Pipeline, table: DegreeTable) -> ChunkShares:
    """The chunks of every layer in each pass: unequal where they take fewer seconds than the best equal ones."""
    backward = _pass_shares(pipeline, table, back=True) if table.trains else None
    return ChunkShares(forward=_pass_shares(pipeline, table, back=False), backward=backward)


def _pass_shares(pipeline: Pipeline, table: DegreeTable, *, back: bool) -> Shares:
    """Those of one pass."""
    equal = _middle(table.backward if back else table.forward)
    factor = pipeline.backward if back else 1.0
    offered = [_offered(table.line(layer), factor, len(equal), pipeline.full_duplex) for layer in range(equal.shape[1])]
    faster_L = _middle(pipeline.taken(Cut.of(tuple(offered)), back=back)[:, None])[0] < equal.min(axis=0)
    degrees_L = (equal.argmin(axis=0) + 1).tolist()
    alike = [(1 / degree,) * degree for degree in degrees_L]
    return tuple(offered[layer] if faster else alike[layer] for layer, faster in enumerate(faster_L))


def _offered(line: dict[str, Any], factor: float, most: int, full_duplex: bool) -> tuple[float, ...]:
    """The shares that are best under lines."""
    slower = line | {name: factor * line[name] for name in ("a_e", "b_e")}
    found = unequal_chunks(**slower, max_degree=most, full_duplex=full_duplex).shares
    kept = [share for share in found if share >= LEAST_SHARE]
    return tuple(share / sum(kept) for share in kept)


def _middle(seconds_SRL: Seconds) -> Seconds:
    """Under the curves themselves, `[R, L]`."""
    middle_RL: Seconds = seconds_SRL[len(seconds_SRL) // 2]
    return middle_RL


def _fastest(seconds_SRL: Seconds) -> NDArray[np.int64]:
    return np.asarray(_middle(seconds_SRL).argmin(axis=0) + 1)


def _robust(seconds_SRL: Seconds) -> NDArray[np.int64]:
    """The degree of every layer that is least wrong, `[L]`."""
    return np.array([robust_degree(seconds_SRL[:, :, layer]).degree for layer in range(seconds_SRL.shape[2])])


def _line(seconds_R: Seconds) -> tuple[float, float]:
    """Start-up and slope over the share of a layer in a chunk; zeros where a stage takes no time."""
    if not seconds_R.all():
        return 0.0, 0.0
    line = AlphaBeta.of(1 / np.arange(1.0, len(seconds_R) + 1), seconds_R)
    return line.a_s, line.b_s
