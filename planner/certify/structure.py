"""What can be checked of a plan without its trace: placement rules, the shape of its evidence, outcome arithmetic."""

from collections.abc import Sequence

from pydantic import ValidationError

from ...errors import CertificationError
from ...runtime.plan import Contender, Part, Plan
from ...solvers.outcome import Outcome, Status
from ..options import EvaluationOptions, PlacementOptions, SecondsOptions
from ..strategy import STRATEGIES
from .certificate import TOLERANCE, Certificate
from .timing import METRICS, check_timing

__all__ = [
    "Holders",
    "check_structure",
    "evaluation_options",
    "holders_of",
    "labelled",
    "seconds_options",
    "slot_widths",
]

Holders = list[list[list[int]]]


def check_structure(plan: Plan, certificate: Certificate) -> None:
    """Refuse a plan that breaks a rule or whose evidence does not hang together."""
    if plan.decisions.placement is not None:
        rows = plan.decisions.placement.physical_to_logical
        for layer, held in enumerate(holders_of(rows, slot_widths(plan), plan.model.num_experts)):
            if missing := [expert for expert, devices in enumerate(held) if not devices]:
                raise CertificationError(f"layer {layer}: expert {missing[0]} is on no device")
            if twice := [expert for expert, devices in enumerate(held) if len(set(devices)) < len(devices)]:
                raise CertificationError(f"layer {layer}: expert {twice[0]} is twice on one device")
        certificate.checks.append("placement rules")
    for decision, outcome in plan.outcome.items():
        _check_arithmetic(decision, outcome, certificate)
    if plan.evaluation is not None:
        _check_evidence(plan)
    elif plan.verdict is not None:
        raise CertificationError("a verdict without an evaluation; re-run moeplan solve")


def evaluation_options(plan: Plan) -> EvaluationOptions:
    """How the plan says it was judged."""
    try:
        return EvaluationOptions.model_validate(dict(plan.options.get("evaluation", {})))
    except ValidationError as error:
        raise CertificationError(f"options.evaluation: {error.error_count()} values missing or wrong") from error


def seconds_options(plan: Plan) -> SecondsOptions:
    """How the plan says its seconds were predicted."""
    try:
        return SecondsOptions.model_validate(dict(plan.options.get("seconds", {})))
    except ValidationError as error:
        raise CertificationError(f"options.seconds: {error.error_count()} values missing or wrong") from error


def labelled(part: Part) -> dict[str, Contender]:
    """The contenders by their labels."""
    return {contender.label: contender for contender in part.contenders}


def slot_widths(plan: Plan) -> list[int]:
    """The slots of every device."""
    decision = plan.decisions.placement
    assert decision is not None
    slots = decision.slots_per_device
    return [slots] * plan.cluster.num_devices if isinstance(slots, int) else list(slots)


def holders_of(rows: Sequence[Sequence[int]], widths: list[int], num_experts: int) -> Holders:
    """The devices that hold each expert, `[layer][expert]`, from the expert in each slot."""
    device_of_slot = [device for device, width in enumerate(widths) for _ in range(width)]
    layers: Holders = []
    for row in rows:
        held: list[list[int]] = [[] for _ in range(num_experts)]
        for device, expert in zip(device_of_slot, row, strict=True):
            held[expert].append(device)
        layers.append(held)
    return layers


def _check_arithmetic(decision: str, outcome: Outcome, certificate: Certificate) -> None:
    """A value is never better than its bound, the gap follows from both, and optimal means that they meet."""
    value, bound = outcome.objective.value, outcome.bound
    if bound is None:
        if outcome.gap is not None or outcome.status is Status.OPTIMAL:
            raise CertificationError(f"outcome of {decision}: a gap or an optimum without a bound")
        return
    beaten = value - bound if outcome.objective.sense == "max" else bound - value
    if beaten > TOLERANCE * max(abs(bound), 1):
        raise CertificationError(f"outcome of {decision}: value {value} is better than its bound {bound}")
    scale = max(abs(value), abs(bound))
    gap = abs(bound - value) / scale if scale else 0.0
    certificate.agree(f"gap of {decision}", outcome.gap, gap)
    if (outcome.status is Status.OPTIMAL) != (gap <= TOLERANCE):
        raise CertificationError(f"outcome of {decision}: status {outcome.status} with a gap of {gap:.3g}")
    certificate.checks.append(f"gap of {decision}")


def _check_evidence(plan: Plan) -> None:
    """An evaluated plan says how it was made, and is judged by its strategy's own metric against contiguous."""
    if plan.decisions.placement is None or [*plan.outcome] != ["placement"] or plan.verdict is None:
        raise CertificationError("an evaluation without a placement, its outcome or a verdict; re-run moeplan solve")
    try:
        options = PlacementOptions.model_validate(dict(plan.options.get("placement", {})))
    except ValidationError as error:
        raise CertificationError(f"options.placement: {error.error_count()} values missing or wrong") from error
    chosen = STRATEGIES.get(options.strategy)
    if chosen is None or plan.strategies != (options.strategy,) or options.dispatch_model not in chosen.dispatch_models:
        raise CertificationError(f"strategies {list(plan.strategies)} with options of {options.strategy!r}")
    expected = _expected_labels(options.dispatch_model)
    assert plan.evaluation is not None
    metric = _judged_metric(plan, chosen.metric)
    if (plan.verdict.metric, plan.verdict.against) != (metric, "contiguous/standard"):
        raise CertificationError(
            f"verdict on {plan.verdict.metric} against {plan.verdict.against}; {chosen.name} is judged on"
            f" {metric} here, against contiguous/standard"
        )
    _check_objective_name(plan)
    check_timing(plan, _timed(plan))
    for part in (plan.evaluation.fit, plan.evaluation.held_out):
        found = [contender.label for contender in part.contenders] if part else expected
        if found != expected:
            raise CertificationError(f"contenders {found}; expected {expected}")


def _timed(plan: Plan) -> set[str]:
    """The parts that the plan names a source of; with what is missing they are all parts there are."""
    if "seconds" not in plan.options:
        return set()
    seconds = seconds_options(plan)
    timed = {source.split()[0] for source in seconds.sources if source}
    if timed & set(seconds.missing) or timed | set(seconds.missing) != set(METRICS):
        raise CertificationError(
            f"options.seconds: sources of {sorted(timed)}, missing {sorted(seconds.missing)}; expected each of"
            f" {', '.join(METRICS)} once"
        )
    return timed


def _judged_metric(plan: Plan, otherwise: str) -> str:
    """`step_s` where the plan and contiguous both have it on the part that judges, of comparable parts."""
    assert plan.evaluation is not None
    found = labelled(plan.evaluation.held_out or plan.evaluation.fit)
    pair = [found.get(f"plan/{plan.dispatch_model}"), found.get("contiguous/standard")]
    there = [set() if one is None else {"step_s", "attention_s"} & one.metrics.keys() for one in pair]
    if there[0] != there[1] or "step_s" not in there[0]:
        return otherwise
    return "step_s" if "attention_s" in there[0] or plan.dispatch_model == "standard" else otherwise


def _check_objective_name(plan: Plan) -> None:
    """The objective is the one its strategy has on such a cluster."""
    assert plan.decisions.placement is not None
    name, sense = "balance", "min"
    if plan.strategies == ("exflow",):
        name, sense = ("hops_kept", "max") if plan.cluster.num_nodes == 1 else ("hop_cost", "min")
        if len(plan.decisions.placement.physical_to_logical[0]) > plan.model.num_experts:
            name = f"expected_{name}"
    outcome = plan.outcome["placement"]
    if (outcome.objective.name, outcome.objective.sense) != (name, sense) or outcome.wall_s < 0:
        raise CertificationError(
            f"objective {outcome.objective.sense} {outcome.objective.name} after {outcome.wall_s} s;"
            f" expected {sense} {name}"
        )


def _expected_labels(dispatch_model: str) -> list[str]:
    """The contenders of a plan under its dispatch model, the plan first."""
    both = ["contiguous/coherent", "plan/standard"] if dispatch_model == "coherent" else []
    return [f"plan/{dispatch_model}", "contiguous/standard", *both, "eplb/standard"]
