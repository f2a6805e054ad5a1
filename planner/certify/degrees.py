"""The pipeline degrees of a plan, and what is said of them, held against every degree timed again.

Legend: R degrees; L MoE layers; S scenarios, the exchanges' curves at each level with the experts' at each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...runtime.decisions import PipelineDecision
from ...runtime.plan import Plan
from ..options import PipelineOptions, StageSeconds
from .certificate import TOLERANCE, Certificate
from .figures import middle
from .recount import Ledger
from .schedule import Schedule, Shares
from .seconds import Clock
from .structure import pipeline_options

__all__ = ["check_degrees", "cut_of", "schedule_of"]

TUTEL_HIGHEST = 32


def check_degrees(plan: Plan, options: PipelineOptions, fitted: Schedule, certificate: Certificate) -> None:
    """Degrees that claim to be best are; the objective and the bound are theirs; stages take what is said."""
    costs = _costs(plan, options, fitted)
    passes = [costs.both] if options.joint else [costs.forward, costs.backward]
    least = float(sum(middle(table).min(axis=0).sum() for table in passes))
    _check_outcome(plan, fitted, costs, least, certificate)
    decision = plan.decisions.pipeline
    assert decision is not None
    claims = {"plan": decision, **options.baselines}
    _check_best("exact", claims["plan" if options.method == "exact" else "exact"], costs, least)
    _check_best("one_degree", claims["one_degree"], costs, float(middle(costs.both).sum(axis=1).min()))
    for name, allowed in (("degree_1", {1}), ("one_degree", {*range(1, options.max_degree + 1)})):
        found = {*claims[name].forward, *(claims[name].backward or ())}
        if len(found) > 1 or not found <= allowed:
            raise CertificationError(f"degrees of {name}: {sorted(found)}")
    if options.method == "robust":
        for table, degrees in zip(passes, (decision.forward, decision.backward), strict=False):
            _check_regret(table, degrees or ())
    _check_tutel(plan, options, costs.both)
    _check_stages(plan, options, fitted, certificate)
    certificate.checks += ["degrees", "objective of pipeline"] + ["bound of pipeline"] * (decision.shares is None)


def schedule_of(plan: Plan, ledger: Ledger, clock: Clock) -> Schedule:
    """What times a recount as the plan says."""
    options, decision = pipeline_options(plan), plan.decisions.pipeline
    assert decision is not None
    return Schedule(ledger, clock, options.backward, options.full_duplex, decision.capacity_factor)


def cut_of(plan: Plan, options: PipelineOptions, name: str) -> tuple[Shares, Shares | None]:
    """The shares of a contender's chunks, forward and backward."""
    decision = plan.decisions.pipeline if name == "plan" else options.baselines[name]
    assert decision is not None
    if decision.shares is not None:
        return decision.shares.forward, decision.shares.backward
    forward = _equal(decision.forward)
    assert forward is not None
    return forward, _equal(decision.backward)


@dataclass(frozen=True, slots=True)
class _Costs:
    """Mean seconds of every layer at every degree in every scenario, `[S, R, L]`, forward and backward."""

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]

    @property
    def both(self) -> NDArray[np.float64]:
        return self.forward + self.backward

    def of(self, one: PipelineDecision) -> float:
        """Of a step at these degrees, under the curves themselves."""
        back = one.forward if one.backward is None else one.backward
        rows = zip(one.forward, back, strict=True)
        there, here = middle(self.forward), middle(self.backward)
        return float(sum(there[f - 1, x] + here[b - 1, x] for x, (f, b) in enumerate(rows)))


def _equal(degrees: tuple[int, ...] | None) -> Shares | None:
    return None if degrees is None else [(Fraction(1, degree),) * degree for degree in degrees]


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
    taken = middle(fitted.taken(shares.forward, back=False)).mean(axis=0).sum()
    if shares.backward is not None:
        taken += middle(fitted.taken(shares.backward, back=True)).mean(axis=0).sum()
    certificate.agree("objective", outcome.objective.value, float(taken))
    if outcome.bound is not None or taken > least * (1 + TOLERANCE):
        raise CertificationError(f"unequal chunks with a bound, or slower than equal ones, {least:.9g}")


def _check_regret(costs_SRL: NDArray[np.float64], degrees: tuple[int, ...]) -> None:
    """No degree has a smaller largest regret."""
    for layer, degree in enumerate(degrees):
        least_S = [min(row) for row in costs_SRL[:, :, layer].tolist()]
        worst_R = [max(x - y for x, y in zip(column, least_S, strict=True)) for column in costs_SRL[:, :, layer].T]
        if worst_R[degree - 1] > min(worst_R) + TOLERANCE * max(least_S):
            raise CertificationError(f"robust degree {degree} of layer {layer}: another has a smaller largest regret")


def _check_tutel(plan: Plan, options: PipelineOptions, both: NDArray[np.float64]) -> None:
    """What Tutel takes is the best of what it takes."""
    degrees, most = options.a2a_ffn_overlap_degree, min(TUTEL_HIGHEST, options.max_degree)
    if len(degrees) != plan.model.num_layers or max(degrees) > most:
        raise CertificationError(f"a2a_ffn_overlap_degree: not one a layer, or above {most}")
    one = PipelineDecision(forward=degrees, backward=None)
    least = float(middle(both)[:most].min(axis=0).sum())
    _check_best("a2a_ffn_overlap_degree", one, _Costs(both, np.zeros_like(both)), least)


def _costs(plan: Plan, options: PipelineOptions, fitted: Schedule) -> _Costs:
    def table(*, back: bool) -> NDArray[np.float64]:
        every = (
            [(Fraction(1, degree),) * degree] * plan.model.num_layers for degree in range(1, options.max_degree + 1)
        )
        return np.stack([fitted.taken(shares, back=back).mean(axis=1) for shares in every], axis=1)

    forward = table(back=False)
    return _Costs(forward, table(back=True) if options.backward else np.zeros_like(forward))


def _check_best(name: str, one: PipelineDecision, costs: _Costs, least: float) -> None:
    if costs.of(one) > least * (1 + TOLERANCE):
        raise CertificationError(f"degrees of {name}: others take fewer seconds, {least:.9g}")


def _check_stages(plan: Plan, options: PipelineOptions, fitted: Schedule, certificate: Certificate) -> None:
    """The stages of the chunks, which a timeline draws."""
    whole = [(1.0,)] * plan.model.num_layers
    cuts = ((whole, 1.0), *zip(cut_of(plan, options, "plan"), (1.0, options.backward), strict=True))
    for claimed, (shares, factor) in zip((options.whole, options.forward, options.backward_pass), cuts, strict=True):
        if (claimed is None) != (shares is None):
            raise CertificationError("options.pipeline: stages of a pass that the plan does not decide")
        if claimed is not None and shares is not None:
            _check_columns(claimed, shares, fitted.stages(shares), factor, certificate)


def _check_columns(
    claimed: StageSeconds,
    shares: Shares,
    chunks: Sequence[tuple[NDArray[np.float64], ...]],
    factor: float,
    certificate: Certificate,
) -> None:
    """A figure a chunk of every layer, or one for all that are alike."""
    for stage, (name, column) in enumerate(claimed):
        scale = factor if name == "experts_s" else 1.0
        found = [scale * middle(chunk[stage]).mean(axis=0) for chunk in chunks]
        counts = [1 if len(set(one)) == 1 and isinstance(one[0], Fraction) else len(one) for one in shares]
        if [*map(len, column)] != counts:
            raise CertificationError(f"options.pipeline: {name} of other chunks than the plan's")
        for layer, figures in enumerate(column):
            for chunk, figure in enumerate(figures):
                certificate.agree(f"{name} of chunk {chunk} of layer {layer}", figure, float(found[chunk][layer]))
