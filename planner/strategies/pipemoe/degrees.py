"""The pipeline degrees of every layer, chosen by what they take on the fitted steps.

By a method's name: "exact" takes the fewest seconds; "paper" is Algorithm 1 as printed; "robust" has the smallest
largest regret while the curves are at any level of their errors; "degree_1" is no pipeline; "one_degree" takes the
fewest seconds of those that all layers and passes share; "unequal" is exact with chunks of unequal shares where these
take fewer seconds. Algorithm 1 and the shares want lines t = a + b share; they are those of least relative error
through the curves at the shares 1/r that a chunk may have, and shares are then judged by the curves.

Degrees of the two passes are chosen together, from pairs of which one divides the other (`nested_pairs`): what the
experts take in one pass depends on the pieces that both make (`cut`).

Legend: P pairs of degrees; R degrees, 1 to the largest allowed; L MoE layers; S scenarios, the exchanges' curves at
each level (low, middle, high) with the experts' at each.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....profilers.fits.laws import AlphaBeta
from ....runtime.decisions import ChunkShares, PipelineDecision
from ....solvers.arrays import Floats, Ints
from ....solvers.pipemoe import TUTEL_MAX_DEGREE, nested_pairs, optimal_degree, robust_choice, unequal_chunks
from ...evaluate.chunks import Cut, Cuts, Pipeline
from ...options import StageSeconds

Shares = tuple[float, ...]
BASELINES = ("degree_1", "one_degree", "paper", "exact")  # methods, whose degrees a plan is held against
LEAST_SHARE = 1e-6  # of a chunk; one below it is none


@dataclass(frozen=True, slots=True)
class DegreeTable:
    """Seconds of every pair of degrees in every layer, mean over steps."""

    #: A forward and a backward degree, `[P, 2]`, the smallest first; the same twice where one serves both passes
    pairs: Ints
    passes_s: Floats  #: Seconds of all passes under every scenario, `[S, P, L]`
    #: dispatch, experts: seconds of one chunk under the curves themselves, `[R, L]`
    dispatch: Floats
    experts: Floats
    trains: bool  #: Whether there is a backward pass
    capacity_factor: float | None  #: As in `PipelineDecision`, of whose decisions it is a part

    @property
    def max_degree(self) -> int:
        """R."""
        return len(self.dispatch)

    def degrees(self, method: str) -> PipelineDecision:
        """The decision by a method's name, equal chunks all."""
        alike, layers = self.alike(self.max_degree), range(self.passes_s.shape[2])
        if method == "degree_1":
            pair_L = np.zeros(len(layers), np.int64)
        elif method == "one_degree":
            pair_L = np.full(len(layers), alike[self.middle[alike].sum(axis=1).argmin()])
        elif method == "paper":
            lines = map(self.line, layers)
            printed = [optimal_degree(**line, max_degree=self.max_degree, method="paper") for line in lines]
            pair_L = alike[[one.forward - 1 for one in printed]]
        elif method == "robust":
            pair_L = np.array([robust_choice(self.passes_s[:, :, layer]).choice for layer in layers])
        else:
            pair_L = self.middle.argmin(axis=0)
        forward, backward = self.pairs[pair_L].T.tolist()
        back = backward if self.trains else None
        return PipelineDecision(forward=forward, backward=back, capacity_factor=self.capacity_factor)

    @property
    def middle(self) -> Floats:
        """Seconds under the curves themselves, the middle scenario, `[P, L]`."""
        middle: Floats = self.passes_s[len(self.passes_s) // 2]
        return middle

    def alike(self, most: int) -> Ints:
        """Indices of the pairs (1, 1) to (most, most)."""
        same = self.pairs[:, 0] == self.pairs[:, 1]
        return np.flatnonzero(same & (self.pairs[:, 0] <= most))

    def chosen(self, degrees: PipelineDecision) -> list[int]:
        """Index of the pair of every layer."""
        where = {pair: at for at, pair in enumerate(map(tuple, self.pairs.tolist()))}
        return [where[pair] for pair in zip(degrees.forward, degrees.backward or degrees.forward, strict=True)]

    def seconds(self, degrees: PipelineDecision) -> float:
        """Seconds of a step's MoE layers in all passes."""
        return float(sum(self.middle[pair, layer] for layer, pair in enumerate(self.chosen(degrees))))

    def line(self, layer: int) -> dict[str, Any]:
        """The lines through both curves of a layer over the share in a chunk, as `optimal_degree` takes them."""
        line, share_R = {"n_d": 1.0, "n_e": 1.0}, 1 / np.arange(1.0, self.max_degree + 1)
        for name, seconds_RL in (("a", self.dispatch), ("e", self.experts)):
            fit = AlphaBeta.of(share_R, seconds_RL[:, layer]) if seconds_RL[:, layer].all() else None  # none is no time
            line |= {f"a_{name}": fit.a_s if fit else 0.0, f"b_{name}": fit.b_s if fit else 0.0}
        return line

    @property
    def tutel(self) -> tuple[int, ...]:
        """`a2a_ffn_overlap_degree` of every layer: the best that Tutel takes, which has one for both passes."""
        return tuple((self.middle[self.alike(TUTEL_MAX_DEGREE)].argmin(axis=0) + 1).tolist())


def tabulated(pipeline: Pipeline, max_degree: int, *, joint: bool) -> DegreeTable:
    """The table of all degrees up to `max_degree`, exact: every step at every pair, or at every degree if `joint`."""
    trains, pairs = bool(pipeline.passes.backward), nested_pairs(max_degree)
    if joint or not trains:
        pairs = pairs[pairs[:, 0] == pairs[:, 1]]
    forward, backward, stages = {}, {}, {}
    for degree, pieces in {(degree, max(pair)) for pair in pairs.tolist() for degree in pair}:
        chunks = pipeline.chunks(Cut.equal(degree, pipeline.scene.model.num_layers, pieces // degree))
        forward[degree, pieces] = pipeline.pass_s(chunks)
        backward[degree, pieces] = pipeline.pass_s(chunks, back=True) if trains else np.zeros(())
        if degree == pieces:
            stages[degree] = [stage.seconds[0].mean(axis=0) for stage in chunks.stages[:2]]
    seconds = [forward[r, max(r, b)] + backward[b, max(r, b)] for r, b in pairs.tolist()]
    dispatch, experts = (np.stack(column) for column in zip(*(stages[r + 1] for r in range(max_degree)), strict=True))
    return DegreeTable(pairs, np.stack(seconds, axis=1), dispatch, experts, trains, pipeline.capacity_factor)


def unequal(pipeline: Pipeline, table: DegreeTable) -> PipelineDecision:
    """The chunks of every layer: the best equal ones, or unequal ones for all passes where these take fewer seconds.

    Those offered are the best of either pass under lines, so that no pass cuts the other's chunks.
    """
    exact = table.degrees("exact")
    passes = zip(exact.forward, exact.backward or exact.forward, strict=True)
    chosen = [tuple((1 / degree,) * degree for degree in pair) for pair in passes]
    least_L = table.middle.min(axis=0)
    for factor in (1.0, pipeline.passes.backward) if table.trains else (1.0,):
        offered = [_offered(table, layer, factor, pipeline.passes.full_duplex) for layer in range(len(chosen))]
        cut = Cut.of(offered)
        taken_L = pipeline.both(Cuts(cut, cut if table.trains else None))
        for layer in np.flatnonzero(taken_L < least_L):
            chosen[layer], least_L[layer] = (offered[layer], offered[layer]), taken_L[layer]
    forward, backward = zip(*chosen, strict=True)
    return PipelineDecision(
        forward=tuple(map(len, forward)),
        backward=tuple(map(len, backward)) if table.trains else None,
        shares=ChunkShares(forward=forward, backward=backward if table.trains else None),
        capacity_factor=table.capacity_factor,
    )


def stages_of(pipeline: Pipeline, cuts: Cuts) -> dict[str, Any]:
    """The stages of the fitted steps in one piece and in chunks, by their names in `PipelineOptions`."""

    def stages(cut: Cut, factor: float = 1.0) -> StageSeconds:
        """Seconds of each chunk, mean over steps; experts take `factor` times as long."""
        dispatch_LC, experts_LC, combine_LC = (one.seconds.mean(axis=1).T for one in pipeline.chunks(cut).stages)
        columns = [
            tuple(tuple(row[:degree]) for row, degree in zip(seconds_LC.tolist(), cut.degree.tolist(), strict=True))
            for seconds_LC in (dispatch_LC, factor * experts_LC, combine_LC)
        ]
        return StageSeconds(**dict(zip(StageSeconds.model_fields, columns, strict=True)))

    return {
        "whole": stages(Cut.equal(1, pipeline.scene.model.num_layers)),
        "forward": stages(cuts.forward),
        "backward_pass": None if cuts.backward is None else stages(cuts.backward, pipeline.passes.backward),
    }


def _offered(table: DegreeTable, layer: int, factor: float, full_duplex: bool) -> Shares:
    """The shares that are best under lines where the experts take `factor` times as long."""
    line = table.line(layer)
    slower = line | {name: factor * line[name] for name in ("a_e", "b_e")}
    shares = unequal_chunks(**slower, max_degree=table.max_degree, full_duplex=full_duplex).shares
    kept = [share for share in shares if share >= LEAST_SHARE]
    return tuple(share / sum(kept) for share in kept)
