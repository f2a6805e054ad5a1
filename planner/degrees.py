"""The pipeline degrees of every layer, chosen by what they take on the fitted steps.

Legend: R degrees, 1 to the largest allowed; L MoE layers; Q levels of the curves (low, middle, high).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..profilers.fits.alpha_beta import AlphaBeta
from ..runtime.decisions import PipelineDecision
from ..solvers.pipemoe import TUTEL_MAX_DEGREE, optimal_degree, robust_degree
from .pipelined import Pipeline

__all__ = ["DegreeTable", "tabulated"]

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DegreeTable:
    """What every degree of every layer takes, mean over steps.

    Parameters
    ----------
    forward, backward
        Seconds of a pass, `[R, L]`; `backward` is None without one.
    dispatch, experts
        Seconds of one chunk at every level of the curves, `[Q, R, L]`.
    joint
        Whether one degree serves both passes.
    factor, full_duplex
        As `Pipeline.backward`, `Pipeline.full_duplex`.
    """

    forward: Seconds
    backward: Seconds | None
    dispatch: Seconds
    experts: Seconds
    joint: bool
    factor: float
    full_duplex: bool

    def degrees(self, method: str) -> PipelineDecision:
        """The degrees by a method's name.

        Parameters
        ----------
        method
            "exact": the fewest seconds. "paper": Algorithm 1 as printed. "robust": the smallest largest regret while
            the curves' lines are anywhere within their errors. "degree_1": no pipeline. "one_degree": the fewest
            seconds of those that all layers and passes share.

        Notes
        -----
        Algorithm 1 and the regret want lines t = a + b share; they are those of least relative error through the
        curves at the shares 1/r that a chunk may have.
        """
        num_layers = self.forward.shape[1]
        if method == "exact" and not self.joint:
            return self._decision(self.forward.argmin(axis=0) + 1, self._backward.argmin(axis=0) + 1)
        if method == "exact":
            return self._decision(self._both.argmin(axis=0) + 1)
        if method == "one_degree":
            return self._decision(np.full(num_layers, self._both.sum(axis=1).argmin() + 1))
        if method == "degree_1":
            return self._decision(np.ones(num_layers, np.int64))
        if method == "paper":
            return self._decision(np.array([self._printed(layer) for layer in range(num_layers)]))
        return self._decision(*(self._robust(passes) for passes in self._robust_passes))

    def seconds(self, degrees: PipelineDecision) -> float:
        """What the MoE layers of a step take in all passes."""
        layers = np.arange(self.forward.shape[1])
        taken = self.forward[np.array(degrees.forward) - 1, layers].sum()
        if degrees.backward is not None:
            taken += self._backward[np.array(degrees.backward) - 1, layers].sum()
        return float(taken)

    @property
    def tutel(self) -> tuple[int, ...]:
        """`a2a_ffn_overlap_degree` of every layer: the best that Tutel takes, which has one for both passes."""
        return tuple((self._both[:TUTEL_MAX_DEGREE].argmin(axis=0) + 1).tolist())

    @property
    def _backward(self) -> Seconds:
        return np.zeros_like(self.forward) if self.backward is None else self.backward

    @property
    def _both(self) -> Seconds:
        return self.forward + self._backward

    def _decision(self, forward: NDArray[np.int64], backward: NDArray[np.int64] | None = None) -> PipelineDecision:
        """The decision of these degrees; the same for both passes unless told."""
        back = forward if backward is None else backward
        return PipelineDecision(forward=forward.tolist(), backward=None if self.backward is None else back.tolist())

    def _printed(self, layer: int) -> int:
        (_, a_a, _), (_, b_a, _) = self._lines(self.dispatch[:, :, layer])
        (_, a_e, _), (_, b_e, _) = self._lines(self.experts[:, :, layer])
        found = optimal_degree(
            a_a=a_a, b_a=b_a, a_e=a_e, b_e=b_e, n_d=1, n_e=1, max_degree=len(self.forward), method="paper"
        )
        return found.forward

    @property
    def _robust_passes(self) -> list[tuple[float, ...]]:
        """The factors of the passes that share a degree, one tuple a degree."""
        if not self.factor:
            return [(1.0,)]
        return [(1.0, self.factor)] if self.joint else [(1.0,), (self.factor,)]

    def _robust(self, passes: tuple[float, ...]) -> NDArray[np.int64]:
        """The degree of every layer that is least wrong for these passes, `[L]`."""
        found = []
        for layer in range(self.forward.shape[1]):
            lines = [line for stage in (self.dispatch, self.experts) for line in self._lines(stage[:, :, layer])]
            a_a, b_a, a_e, b_e = ((min(levels), max(levels)) for levels in lines)
            chosen = robust_degree(
                a_a=a_a,
                b_a=b_a,
                a_e=a_e,
                b_e=b_e,
                n_d=1,
                n_e=1,
                passes=passes,
                max_degree=len(self.forward),
                full_duplex=self.full_duplex,
            )
            found.append(chosen.degree)
        return np.array(found)

    def _lines(self, seconds_QR: Seconds) -> tuple[list[float], list[float]]:
        """Start-up and slope over the share of a layer in a chunk, one a level; zeros where a stage takes no time."""
        share_R = 1 / np.arange(1.0, seconds_QR.shape[1] + 1)
        if not seconds_QR.all():
            return [0.0] * 3, [0.0] * 3
        lines = [AlphaBeta.of(share_R, seconds_R) for seconds_R in seconds_QR]
        return [line.a_s for line in lines], [line.b_s for line in lines]


def tabulated(pipeline: Pipeline, max_degree: int, *, joint: bool) -> DegreeTable:
    """The table of all degrees up to `max_degree`, exact: every step at every degree."""
    num_layers = pipeline.model.num_layers
    passes: list[list[Seconds]] = [[], []]
    stages: list[list[Seconds]] = [[], []]
    for degree in range(1, max_degree + 1):
        degree_L = np.full(num_layers, degree)
        chunk = pipeline.chunk(degree_L)
        passes[0].append(pipeline.forward_s(chunk, degree_L).seconds.mean(axis=0))
        if pipeline.backward:
            passes[1].append(pipeline.backward_s(chunk, degree_L).seconds.mean(axis=0))
        for found, stage in zip(stages, chunk.stages[:2], strict=True):
            found.append(np.stack([stage.low, stage.seconds, stage.high]).mean(axis=1))
    dispatch, experts = (np.stack(found, axis=1) for found in stages)
    return DegreeTable(
        np.array(passes[0]),
        np.array(passes[1]) if pipeline.backward else None,
        dispatch,
        experts,
        joint,
        pipeline.backward,
        pipeline.full_duplex,
    )
