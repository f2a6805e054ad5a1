"""A sample policy held against its trace: samples counted again, its predictor fitted again, its homes solved again by
min-cost flow, and every figure, interval, gain and verdict from the exchanges that these homes give.

Legend: I samples; L MoE layers; E experts; D devices; N nodes; B steps.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...profilers.profile import Profile
from ...runtime.decisions import PlacementDecision
from ...runtime.plan import Contender, Part, Plan
from ...solvers import contiguous
from ...traces.count_form import CountTrace
from ...traces.reader import Trace
from .census import Census, take_census
from .certificate import Certificate
from .evaluation import check_contender, check_seconds, check_verdict
from .figures import Recounted, gain_interval, interval_of, middle
from .policy_structure import BLIND, DEALT, ORACLE, PLAN, decision_of, policy_options
from .predictor import predictors_of
from .rehomed import Reached, Seen, dealt_homes, ledger_of, locality_of, reached, rehomed
from .seconds import Clock
from .structure import Holders, evaluation_options, holders_of, labelled, slot_widths

__all__ = ["check_sample_policy"]

MOVED = "samples_moved"
PARTS = ("attention_s", "dispatch_s", "experts_s", "combine_s")


def check_sample_policy(
    plan: Plan,
    trace: Trace | CountTrace,
    profile: Profile | None,
    certificate: Certificate,
    say: Callable[[str], None],
    *,
    folder: Path | None = None,
) -> None:
    """Hold every figure of a sample policy against a recount.

    Parameters
    ----------
    profile
        The plan's; None leaves its seconds unchecked, unless they come from links alone.
    folder
        Where the plan lies, and its predictor beside it; by default the working directory.

    Raises
    ------
    CertificationError
        A figure, or the predictor, is not what the trace gives.
    InputError
        There is no predictor beside the plan.
    """
    assert plan.evaluation is not None
    if (policy_options(plan).copies == "pairs") != isinstance(trace, CountTrace):
        raise CertificationError(f"copies are {policy_options(plan).copies}; expected pairs of a trace of counts alone")
    placed, holders = _placements(plan)
    say("counting the samples again")
    census = take_census(trace, plan, holders)
    _check_roll(plan, census, certificate)
    predictors = predictors_of(plan, census, folder or Path(), certificate)
    clock = None
    if "seconds" in plan.options and (profile is not None or plan.inputs.profile is None):
        clock = Clock(placed, profile, samples=True)
    found: dict[str, Recounted] = {}
    for part, fit in ((plan.evaluation.fit, True), (plan.evaluation.held_out, False)):
        if part is not None:
            say(f"re-homing the {'fitted' if fit else 'held-out'} samples again, by min-cost flow")
            found = _check_part(placed, census, predictors, part, clock, certificate, fit=fit)
    certificate.checks.append("metrics of every contender")
    _check_tried(placed, census, predictors["plan"], clock, certificate)
    check_seconds(plan, clock, certificate)
    check_verdict(plan, found, certificate)
    _check_over_dealt(plan, found, certificate)
    if policy_options(plan).asked:
        certificate.unchecked.append("that the method was asked for")
    if decision_of(placed).method == "bottleneck":
        certificate.unchecked.append("that the swaps of bottleneck stop where they should")
    certificate.unchecked.append("solver seconds and backend")


def _placements(plan: Plan) -> tuple[Plan, dict[str, Holders]]:
    """The plan with the placement that its samples move under, and the holders of it and of contiguous."""
    model = plan.model
    in_order = PlacementDecision.of(contiguous.solve(model.num_layers, model.num_experts, plan.cluster).placement)
    decision = plan.decisions.placement or in_order
    placed = plan.model_copy(update={"decisions": plan.decisions.model_copy(update={"placement": decision})})
    plain = plan.model_copy(update={"decisions": plan.decisions.model_copy(update={"placement": in_order})})
    return placed, {
        "plan": holders_of(decision.physical_to_logical, slot_widths(placed), model.num_experts),
        "contiguous": holders_of(in_order.physical_to_logical, slot_widths(plain), model.num_experts),
    }


def _check_roll(plan: Plan, census: Census, certificate: Certificate) -> None:
    options, assumed = evaluation_options(plan), policy_options(plan)
    home = "source_rank" if census.recorded_home == plan.cluster.num_devices else "ordinal"
    found = (census.unit, home, "recorded" if census.has_steps else "derived")
    if (options.unit, options.home, options.step) != found:
        raise CertificationError(f"options of the evaluation differ from the trace's: {found}")
    blind, least = locality_of(plan, census)
    certificate.agree("blind copies", assumed.blind_copies, blind)
    certificate.agree("least copies", assumed.least_copies, least)
    if not census.by_tokens and plan.inputs.trace is not None:
        certificate.agree("tokens of the trace", plan.inputs.trace.num_tokens, int(census.tokens.sum()))
    certificate.checks.append("samples, split and locality")


def _check_part(
    placed: Plan,
    census: Census,
    predictors: dict[str, NDArray[np.float32] | None],
    part: Part,
    clock: Clock | None,
    certificate: Certificate,
    *,
    fit: bool,
) -> dict[str, Recounted]:
    name = "fit" if fit else "held out"
    klass = census.classed(placed, fit=fit)
    certificate.agree(f"{name}: samples", part.num_samples, len(klass.members))
    certificate.agree(f"{name}: tokens", part.num_tokens, int(census.tokens[klass.members].sum()))
    certificate.agree(f"{name}: steps", part.num_steps, klass.num_steps)
    certificate.agree(f"{name}: dropped samples", part.dropped_samples, int((klass.step < 0).sum()))
    if clock is not None:
        clock.outside.clear()
    figures, method = {}, decision_of(placed).method
    for label, contender in labelled(part).items():
        where = "contiguous" if label.startswith("contiguous") else "plan"
        moved = dealt_homes(placed, census, klass) if label == DEALT else None
        if contender.dispatch_model == "migrating":
            per_pair = None if label == BLIND else predictors[where]
            seen = Seen.of(census, klass, where, per_pair, oracle=label == ORACLE)
            moved = rehomed(placed, seen, method)
            if fit and label == PLAN:
                _check_outcome(placed, reached(placed, seen, method, moved), certificate)
        ledger, moves_B = ledger_of(placed, census, klass, where, moved, timed=clock is not None)
        seconds = clock.seconds(ledger, coherent=False) if clock else None
        if seconds is not None and "dispatch_s" in seconds:
            seconds["exchange_s"] = seconds["dispatch_s"] + seconds["combine_s"]
        _check_moves(f"{name}: {label}", contender, moves_B, placed.seed, certificate)
        kept = {key: metric for key, metric in contender.metrics.items() if key != MOVED}
        others = contender.model_copy(update={"metrics": kept})
        found = check_contender(placed, f"{name}: {label}", ledger, others, seconds, certificate)
        figures[label] = found
    return figures


def _check_outcome(plan: Plan, found: Reached, certificate: Certificate) -> None:
    outcome = plan.outcome["sample_policy"]
    if outcome.objective.name != found.name:
        raise CertificationError(f"objective {outcome.objective.name}; the recount has {found.name}")
    certificate.agree("objective", outcome.objective.value, found.value)
    certificate.agree("bound", outcome.bound, found.bound)
    certificate.checks.append("objective and bound")


def _check_over_dealt(plan: Plan, found: dict[str, Recounted], certificate: Certificate) -> None:
    """What the plan has less than samples dealt by length alone; unchecked where the verdict's gain is."""
    assert plan.verdict is not None
    claimed, metric, ours, theirs = policy_options(plan).over_dealt, plan.verdict.metric, found[PLAN], found[DEALT]
    if claimed is None or metric not in ours.value:
        certificate.unchecked.append("the gain over samples dealt by length")
        return
    low, high = gain_interval(metric, ours, theirs)
    certificate.agree("gain over dealt", claimed.value, theirs.value[metric] - ours.value[metric])
    certificate.agree("gain over dealt low", claimed.low, low)
    certificate.agree("gain over dealt high", claimed.high, high)


def _check_tried(
    plan: Plan, census: Census, per_pair: NDArray[np.float32] | None, clock: Clock | None, certificate: Certificate
) -> None:
    """The methods that were tried on the fitted steps, again; without what times them they stay unchecked."""
    tried = policy_options(plan).tried_s
    if tried and clock is None:
        certificate.unchecked.append("seconds of the methods tried")
    elif tried and clock is not None:
        klass = census.classed(plan, fit=True)
        for method, claimed_s in tried.items():
            moved = rehomed(plan, Seen.of(census, klass, "plan", per_pair), method)
            ledger, _ = ledger_of(plan, census, klass, "plan", moved, timed=True)
            seconds = replace(clock, outside={}).seconds(ledger, coherent=False)
            found_s = sum(float(middle(seconds[part]).mean()) for part in PARTS if part in seconds)
            certificate.agree(f"tried {method}", claimed_s, found_s)
        certificate.checks.append("methods tried")


def _check_moves(
    label: str, contender: Contender, moves_B: NDArray[np.float64], seed: int, certificate: Certificate
) -> None:
    claimed, low, high = contender.metrics.get(MOVED), None, None
    if len(moves_B) > 1:
        rng = np.random.default_rng(seed)
        draws = [moves_B[rng.integers(len(moves_B), size=len(moves_B))].mean() for _ in range(1000)]
        low, high = interval_of({"": np.array([draws])})
    if claimed is None:
        raise CertificationError(f"{label}: no {MOVED}; re-run moeplan solve")
    certificate.agree(f"{label}: {MOVED}", claimed.value, float(moves_B.mean()))
    certificate.agree(f"{label}: {MOVED} low", claimed.low, low)
    certificate.agree(f"{label}: {MOVED} high", claimed.high, high)
