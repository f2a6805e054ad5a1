"""The pipeline degrees of a plan, and what is said of them, held against every degree timed again.

Legend: P pairs of degrees; L MoE layers; S scenarios, the exchanges' curves at each level with the experts' at each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...runtime.decisions import PipelineDecision
from ...runtime.plan import Plan
from ..options import PipelineOptions, StageSeconds
from .certificate import TOLERANCE, Certificate
from .figures import middle
from .pieces import Pass, passes_of
from .recount import Ledger
from .schedule import Schedule
from .seconds import Clock
from .structure import pipeline_options

__all__ = ["check_degrees", "cut_of", "schedule_of"]

TUTEL_HIGHEST = 32


def check_degrees(plan: Plan, options: PipelineOptions, fitted: Schedule, certificate: Certificate) -> None:
    """Degrees that claim to be best are; the objective and the bound are theirs; stages take what is said."""
    costs = _costs(plan, options, fitted)
    least = float(middle(costs.taken).min(axis=0).sum())
    _check_outcome(plan, fitted, costs, least, certificate)
    decision = plan.decisions.pipeline
    assert decision is not None
    claims = {"plan": decision, **options.baselines}
    _check_best("exact", claims["plan" if options.method == "exact" else "exact"], costs, least)
    one_degree = float(middle(costs.alike(options.max_degree)).sum(axis=1).min())
    _check_best("one_degree", claims["one_degree"], costs, one_degree)
    for name, allowed in (("degree_1", {1}), ("one_degree", {*range(1, options.max_degree + 1)})):
        found = {*claims[name].forward, *(claims[name].backward or ())}
        if len(found) > 1 or not found <= allowed:
            raise CertificationError(f"degrees of {name}: {sorted(found)}")
    if options.method == "robust":
        _check_regret(costs, decision)
    _check_tutel(plan, options, costs)
    _check_stages(plan, options, fitted, certificate)
    certificate.checks += ["degrees", "objective of pipeline"] + ["bound of pipeline"] * (decision.shares is None)


def schedule_of(plan: Plan, ledger: Ledger, clock: Clock) -> Schedule:
    """What times a recount as the plan says."""
    options, decision = pipeline_options(plan), plan.decisions.pipeline
    assert decision is not None
    return Schedule(ledger, clock, options.backward, options.full_duplex, decision.capacity_factor)


def cut_of(plan: Plan, options: PipelineOptions, name: str) -> tuple[Pass, Pass | None]:
    """The pieces of a contender's chunks, forward and backward."""
    decision = plan.decisions.pipeline if name == "plan" else options.baselines[name]
    assert decision is not None
    return passes_of(decision, name)


@dataclass(frozen=True, slots=True)
class _Costs:
    """Mean seconds of every layer, all passes, at every pair of degrees in every scenario, `[S, P, L]`."""

    pairs: list[tuple[int, int]]
    taken: NDArray[np.float64]

    def of(self, one: PipelineDecision) -> float:
        """Of a step at these degrees, under the curves themselves."""
        return float(sum(middle(self.taken)[pair, layer] for layer, pair in enumerate(self.places(one))))

    def places(self, one: PipelineDecision) -> list[int]:
        """The pair of every layer."""
        return [self.pairs.index(pair) for pair in zip(one.forward, one.backward or one.forward, strict=True)]

    def alike(self, most: int) -> NDArray[np.float64]:
        """With one degree for both passes, up to the largest."""
        places = [self.pairs.index((degree, degree)) for degree in range(1, most + 1)]
        return self.taken[:, places]


def _check_outcome(plan: Plan, fitted: Schedule, costs: _Costs, least: float, certificate: Certificate) -> None:
    """The objective is what the plan takes; the bound, where degrees are chosen, the least that any degrees take."""
    outcome, decision = plan.outcome["pipeline"], plan.decisions.pipeline
    assert decision is not None
    shares = decision.shares
    goal = (outcome.objective.name, outcome.objective.sense, outcome.bound_kind)
    if goal != ("moe_s", "min", "full search" if shares is None else None):
        raise CertificationError(f"objective and bound {goal}; expected the least moe_s by a full search")
    if shares is None:
        certificate.agree("objective", outcome.objective.value, costs.of(decision))
        certificate.agree("bound", outcome.bound, least)
        return
    forward, backward = passes_of(decision, "plan")
    taken = middle(fitted.taken(forward, back=False)).mean(axis=0).sum()
    if backward is not None:
        taken += middle(fitted.taken(backward, back=True)).mean(axis=0).sum()
    certificate.agree("objective", outcome.objective.value, float(taken))
    if outcome.bound is not None or taken > least * (1 + TOLERANCE):
        raise CertificationError(f"unequal chunks with a bound, or slower than equal ones, {least:.9g}")


def _check_regret(costs: _Costs, decision: PipelineDecision) -> None:
    """No degrees have a smaller largest regret."""
    for layer, pair in enumerate(costs.places(decision)):
        taken_SP = costs.taken[:, :, layer]
        least_S = [min(row) for row in taken_SP.tolist()]
        worst_P = [max(x - y for x, y in zip(column, least_S, strict=True)) for column in taken_SP.T]
        if worst_P[pair] > min(worst_P) + TOLERANCE * max(least_S):
            raise CertificationError(f"robust degrees of layer {layer}: others have a smaller largest regret")


def _check_tutel(plan: Plan, options: PipelineOptions, costs: _Costs) -> None:
    """What Tutel takes is the best of what it takes."""
    degrees, most = options.a2a_ffn_overlap_degree, min(TUTEL_HIGHEST, options.max_degree)
    if len(degrees) != plan.model.num_layers or max(degrees) > most:
        raise CertificationError(f"a2a_ffn_overlap_degree: not one a layer, or above {most}")
    one = PipelineDecision(forward=degrees, backward=None)
    least = float(middle(costs.alike(most)).min(axis=0).sum())
    _check_best("a2a_ffn_overlap_degree", one, costs, least)


def _costs(plan: Plan, options: PipelineOptions, fitted: Schedule) -> _Costs:
    @cache
    def taken(degree: int, pieces: int, *, back: bool) -> NDArray[np.float64]:
        calls = (Fraction(1, pieces),) * (pieces // degree)
        mean_SL: NDArray[np.float64] = fitted.taken([[calls] * degree] * plan.model.num_layers, back=back).mean(axis=1)
        return mean_SL

    degrees, one_for_both = range(1, options.max_degree + 1), options.joint or not options.backward
    every = [(degree, degree) for degree in degrees] if one_for_both else product(degrees, repeat=2)
    pairs = [(there, back) for there, back in every if max(there, back) % min(there, back) == 0]
    rows = [taken(there, max(there, back), back=False) for there, back in pairs]
    if options.backward:
        rows = [row + taken(back, max(there, back), back=True) for row, (there, back) in zip(rows, pairs, strict=True)]
    return _Costs(pairs, np.stack(rows, axis=1))


def _check_best(name: str, one: PipelineDecision, costs: _Costs, least: float) -> None:
    if costs.of(one) > least * (1 + TOLERANCE):
        raise CertificationError(f"degrees of {name}: others take fewer seconds, {least:.9g}")


def _check_stages(plan: Plan, options: PipelineOptions, fitted: Schedule, certificate: Certificate) -> None:
    """The stages of the chunks, which a timeline draws."""
    whole: Pass = [[(Fraction(1),)]] * plan.model.num_layers
    cuts = ((whole, 1.0), *zip(cut_of(plan, options, "plan"), (1.0, options.backward), strict=True))
    for claimed, (pieces, factor) in zip((options.whole, options.forward, options.backward_pass), cuts, strict=True):
        if (claimed is None) != (pieces is None):
            raise CertificationError("options.pipeline: stages of a pass that the plan does not decide")
        if claimed is not None and pieces is not None:
            _check_columns(claimed, pieces, fitted.stages(pieces), factor, certificate)


def _check_columns(
    claimed: StageSeconds,
    pieces: Pass,
    chunks: Sequence[tuple[NDArray[np.float64], ...]],
    factor: float,
    certificate: Certificate,
) -> None:
    """A figure a chunk of every layer, or one for all that are alike."""
    for stage, (name, column) in enumerate(claimed):
        scale = factor if name == "experts_s" else 1.0
        found = [scale * middle(chunk[stage]).mean(axis=0) for chunk in chunks]
        counts = [1 if len({*one}) == 1 and isinstance(one[0][0], Fraction) else len(one) for one in pieces]
        if [*map(len, column)] != counts:
            raise CertificationError(f"options.pipeline: {name} of other chunks than the plan's")
        for layer, figures in enumerate(column):
            for chunk, figure in enumerate(figures):
                certificate.agree(f"{name} of chunk {chunk} of layer {layer}", figure, float(found[chunk][layer]))
