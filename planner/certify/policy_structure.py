"""What a sample policy claims without its trace: decision, options, outcome, contenders and verdict belong together."""

from ...errors import CertificationError
from ...runtime.decisions import SamplePolicyDecision
from ...runtime.plan import Plan
from ..netmoe.policy import SamplePolicyOptions
from .certificate import Certificate
from .structure import judged_metric, parsed_options, slot_widths

__all__ = ["BLIND", "DEALT", "ORACLE", "PLAN", "check_sample_policy_structure", "decision_of", "policy_options"]

METHODS = {"sum": "link_cost", "even": "link_cost", "paper": "link_cost", "bottleneck": "exchange_s"}
TRIED = ("sum", "even", "bottleneck")
AT_LEAST = 0.02  # of bytes, copies or their seconds, for what they do not hold
PLAN, ORACLE, BLIND, STILL = "plan/migrating", "oracle/migrating", "unpredicted/migrating", "contiguous/standard"
DEALT = "dealt/standard"


def check_sample_policy_structure(plan: Plan, certificate: Certificate) -> None:
    """Refuse a sample policy whose decision, options, outcome and contenders do not hang together."""
    decision, verdict = decision_of(plan), plan.verdict
    if decision.method not in METHODS or decision.layers != tuple(range(plan.model.num_layers)):
        raise CertificationError(
            f"sample_policy by {decision.method!r} after {len(decision.layers)} of {plan.model.num_layers} layers;"
            f" expected {' or '.join(METHODS)}, after every layer"
        )
    if (decision.predictor is None) != (decision.method == "paper"):
        raise CertificationError(f"sample_policy by {decision.method} with the wrong predictor: only paper has none")
    outcome = plan.outcome.get("sample_policy")
    if outcome is None or plan.evaluation is None or verdict is None:
        raise CertificationError("a sample policy without its outcome, evaluation or verdict; re-run moeplan solve")
    names = {METHODS[decision.method], "busiest_cost" if decision.method == "bottleneck" else "link_cost"}
    if outcome.objective.name not in names or outcome.objective.sense != "min":
        raise CertificationError(f"objective {outcome.objective.sense} {outcome.objective.name}; expected min {names}")
    kind = "weighted ports" if decision.method == "bottleneck" else "transportation"
    if outcome.bound_kind != kind:
        raise CertificationError(f"bound of {decision.method}: {outcome.bound_kind}; expected {kind}")
    for part in (plan.evaluation.fit, plan.evaluation.held_out):
        found = [contender.label for contender in part.contenders] if part else _labels(plan)
        if found != _labels(plan):
            raise CertificationError(f"contenders {found}; expected {_labels(plan)}: re-run moeplan solve")
    _check_options(plan)
    metric = judged_metric(plan, PLAN, _base(plan), _metric(plan))
    expected = (metric, _base(plan), 0.0 if metric == "step_s" else AT_LEAST)
    if (verdict.metric, verdict.against, verdict.at_least) != expected:
        raise CertificationError(
            f"verdict on {verdict.metric} against {verdict.against}, above {verdict.at_least}; expected {expected}:"
            " re-run moeplan solve"
        )
    certificate.checks.append("sample policy")


def _check_options(plan: Plan) -> None:
    """Where exchanges are timed and no method was asked for, the fastest was taken; counts go with no replicas."""
    options, method, model = policy_options(plan), decision_of(plan).method, plan.model
    tried = options.tried_s
    expected = set() if options.asked or _metric(plan) != "exchange_s" else set(TRIED)
    if set(tried) != expected or (tried and tried[method] > min(tried.values())):
        wanted = f"the fastest of {', '.join(TRIED)}" if expected else "no methods tried"
        raise CertificationError(f"{method} of {dict(tried)} s; expected {wanted}: re-run moeplan solve")
    if not (tried or options.asked) and method != "sum":
        raise CertificationError(f"{method}, not asked for and untimed; expected sum: re-run moeplan solve")
    if options.over_dealt is None:
        raise CertificationError("options.sample_policy: no over_dealt; re-run moeplan solve")
    divided = model.num_experts % plan.cluster.num_devices == 0
    if options.copies == "pairs" and not (divided and sum(slot_widths(plan)) == model.num_experts):
        raise CertificationError(
            f"counts with replicas: {model.num_experts} experts on the {plan.cluster.num_devices} devices of"
            f" {plan.cluster}; expected devices that divide the experts, and one slot an expert"
        )


def decision_of(plan: Plan) -> SamplePolicyDecision:
    """The sample policy that a plan decides."""
    assert plan.decisions.sample_policy is not None
    return plan.decisions.sample_policy


def policy_options(plan: Plan) -> SamplePolicyOptions:
    """How the plan says it was decided."""
    return parsed_options(plan, "sample_policy", SamplePolicyOptions)


def _labels(plan: Plan) -> list[str]:
    between = [] if plan.decisions.placement is None else ["base/standard", "contiguous/migrating"]
    blind = [] if decision_of(plan).predictor is None else [BLIND]
    return [PLAN, ORACLE, *blind, *between, DEALT, STILL]


def _base(plan: Plan) -> str:
    return STILL if plan.decisions.placement is None else "base/standard"


def _metric(plan: Plan) -> str:
    """What the verdict is about where steps do not compare."""
    assert plan.evaluation is not None
    if "exchange_s" in plan.evaluation.fit.contenders[0].metrics:
        return "exchange_s"
    if plan.cluster.num_nodes == 1:
        return "device_copies"
    return "inter_bytes" if plan.model.copy_bytes else "node_copies"
