"""A sample policy held against its trace: samples counted again, its predictor fitted again, its homes solved again by
min-cost flow, and every figure, interval, gain and verdict from the exchanges that these homes give.

Legend: I samples; L MoE layers; E experts; D devices; N nodes; B steps.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ...errors import CertificationError, InputError
from ...profilers.profile import Profile
from ...runtime.decisions import PlacementDecision, SamplePolicyDecision
from ...runtime.plan import Contender, Part, Plan
from ...solvers import contiguous
from ...traces.count_form import CountTrace
from ...traces.reader import Trace
from ..netmoe.policy import SamplePolicyOptions
from .census import Census, take_census
from .certificate import Certificate
from .evaluation import check_contender, check_seconds, check_verdict
from .figures import Recounted, interval_of
from .predictor import check_predictor, fitted_again, read_predictor
from .rehomed import Rehomed, ledger_of, locality_of, rehomed
from .seconds import Clock
from .structure import Holders, evaluation_options, holders_of, judged_metric, labelled, slot_widths

__all__ = ["check_sample_policy", "check_sample_policy_structure"]

METHODS = {"sum": "link_cost", "paper": "link_cost", "bottleneck": "exchange_s"}
MOVED = "samples_moved"
PLAN, ORACLE, STILL = "plan/migrating", "oracle/migrating", "contiguous/standard"


def check_sample_policy_structure(plan: Plan, certificate: Certificate) -> None:
    """Refuse a sample policy whose decision, options, outcome and contenders do not hang together."""
    decision, verdict = _decision(plan), plan.verdict
    if decision.method not in METHODS or decision.layers != tuple(range(plan.model.num_layers)):
        raise CertificationError(
            f"sample_policy by {decision.method!r} after {len(decision.layers)} of {plan.model.num_layers} layers;"
            f" expected {' or '.join(METHODS)}, after every layer"
        )
    if (decision.predictor is None) != (decision.method == "paper"):
        raise CertificationError(f"sample_policy by {decision.method} with the wrong predictor: only paper has none")
    _options(plan)
    outcome = plan.outcome.get("sample_policy")
    if outcome is None or plan.evaluation is None or verdict is None:
        raise CertificationError("a sample policy without its outcome, evaluation or verdict; re-run moeplan solve")
    names = {METHODS[decision.method], "busiest_cost" if decision.method == "bottleneck" else "link_cost"}
    if outcome.objective.name not in names or outcome.objective.sense != "min":
        raise CertificationError(f"objective {outcome.objective.sense} {outcome.objective.name}; expected min {names}")
    for part in (plan.evaluation.fit, plan.evaluation.held_out):
        found = [contender.label for contender in part.contenders] if part else _labels(plan)
        if found != _labels(plan):
            raise CertificationError(f"contenders {found}; expected {_labels(plan)}")
    expected = (judged_metric(plan, PLAN, _base(plan), _metric(plan)), _base(plan))
    if (verdict.metric, verdict.against) != expected:
        raise CertificationError(f"verdict on {verdict.metric} against {verdict.against}; expected {expected}")
    certificate.checks.append("sample policy")


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
    check_sample_policy_structure(plan, certificate)
    assert plan.evaluation is not None
    placed, holders = _placements(plan)
    say("counting the samples again")
    census = take_census(trace, plan, holders)
    _check_roll(plan, census, certificate)
    predictors = _predictors(plan, census, folder or Path(), certificate)
    clock = None
    if "seconds" in plan.options and (profile is not None or plan.inputs.profile is None):
        clock = Clock(placed, profile, samples=True)
    found: dict[str, Recounted] = {}
    for part, fit in ((plan.evaluation.fit, True), (plan.evaluation.held_out, False)):
        if part is not None:
            say(f"re-homing the {'fitted' if fit else 'held-out'} samples again, by min-cost flow")
            found = _check_part(placed, census, predictors, part, clock, certificate, fit=fit)
    certificate.checks.append("metrics of every contender")
    check_seconds(plan, clock, certificate)
    check_verdict(plan, found, certificate)
    certificate.unchecked.append("solver seconds and backend")


def _decision(plan: Plan) -> SamplePolicyDecision:
    assert plan.decisions.sample_policy is not None
    return plan.decisions.sample_policy


def _options(plan: Plan) -> SamplePolicyOptions:
    try:
        return SamplePolicyOptions.model_validate(dict(plan.options.get("sample_policy", {})))
    except ValidationError as error:
        raise CertificationError(f"options.sample_policy: {error.error_count()} values missing or wrong") from error


def _labels(plan: Plan) -> list[str]:
    between = [] if plan.decisions.placement is None else ["base/standard", "contiguous/migrating"]
    return [PLAN, ORACLE, *between, STILL]


def _base(plan: Plan) -> str:
    return STILL if plan.decisions.placement is None else "base/standard"


def _metric(plan: Plan) -> str:
    """What the verdict is about where steps do not compare."""
    if plan.cluster.num_nodes == 1:
        return "device_copies"
    return "inter_bytes" if plan.model.hidden_size and plan.model.dtype_bytes else "node_copies"


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
    options, assumed = evaluation_options(plan), _options(plan)
    home = "source_rank" if census.recorded_home == plan.cluster.num_devices else "ordinal"
    found = (census.unit, home, "recorded" if census.has_steps else "derived", ["pairs", "devices"][census.by_tokens])
    if (options.unit, options.home, options.step, assumed.copies) != found:
        raise CertificationError(f"options of the evaluation or the policy differ from the trace's: {found}")
    blind, least = locality_of(plan, census)
    certificate.agree("blind copies", assumed.blind_copies, blind)
    certificate.agree("least copies", assumed.least_copies, least)
    if not census.by_tokens and plan.inputs.trace is not None:
        certificate.agree("tokens of the trace", plan.inputs.trace.num_tokens, int(census.tokens.sum()))
    certificate.checks.append("samples, split and locality")


def _predictors(
    plan: Plan, census: Census, folder: Path, certificate: Certificate
) -> dict[str, NDArray[np.float32] | None]:
    """By placement: the plan's from its file, held against a fit; contiguous' from the fit."""
    named = _decision(plan).predictor
    if named is None:
        return {"plan": None, "contiguous": None}
    contents = read_predictor(folder / named.file)
    if hashlib.sha256(contents).hexdigest() != named.sha256:
        raise CertificationError(f"{folder / named.file}: another predictor than the plan's; re-run moeplan solve")
    try:
        per_pair = check_predictor(contents, plan, census.sent["plan"], census)
    except InputError as error:
        raise CertificationError(f"{folder / named.file}: {error}") from error
    certificate.checks.append("predictor")
    return {"plan": per_pair, "contiguous": fitted_again(plan, census.sent["contiguous"], census)}


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
    figures = {}
    for label, contender in labelled(part).items():
        where = "contiguous" if label.startswith("contiguous") else "plan"
        moved = None
        if contender.dispatch_model == "migrating":
            moved = rehomed(placed, census, klass, where, predictors[where], oracle=label == ORACLE)
        if fit and label == PLAN and moved is not None:
            _check_outcome(placed, moved, certificate)
        ledger, moves_B = ledger_of(placed, census, klass, where, moved, timed=clock is not None)
        seconds = clock.seconds(ledger, coherent=False) if clock else None
        _check_moves(f"{name}: {label}", contender, moves_B, placed.seed, certificate)
        kept = {key: metric for key, metric in contender.metrics.items() if key != MOVED}
        others = contender.model_copy(update={"metrics": kept})
        found = check_contender(placed, f"{name}: {label}", ledger, others, seconds, certificate)
        figures[label] = found
    return figures


def _check_outcome(plan: Plan, found: Rehomed, certificate: Certificate) -> None:
    outcome = plan.outcome["sample_policy"]
    if outcome.objective.name != found.objective:
        raise CertificationError(f"objective {outcome.objective.name}; the recount has {found.objective}")
    certificate.agree("objective", outcome.objective.value, found.value)
    certificate.agree("bound", outcome.bound, found.bound)
    certificate.checks.append("objective and bound")


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
