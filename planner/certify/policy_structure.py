"""What a sample policy claims without its trace: decision, options, outcome, contenders and verdict belong together."""

from pydantic import ValidationError

from ...errors import CertificationError
from ...runtime.decisions import SamplePolicyDecision
from ...runtime.plan import Plan
from ..netmoe.policy import SamplePolicyOptions
from .certificate import Certificate
from .structure import judged_metric

__all__ = ["BLIND", "ORACLE", "PLAN", "check_sample_policy_structure", "decision_of", "policy_options"]

METHODS = {"sum": "link_cost", "even": "link_cost", "paper": "link_cost", "bottleneck": "exchange_s"}
TRIED = ("sum", "even", "bottleneck")
AT_LEAST = 0.02  # of bytes, copies or their seconds, for what they do not hold
PLAN, ORACLE, BLIND, STILL = "plan/migrating", "oracle/migrating", "unpredicted/migrating", "contiguous/standard"


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
    tried = policy_options(plan).tried_s
    if tried and (set(tried) != set(TRIED) or tried[decision.method] > min(tried.values())):
        raise CertificationError(f"{decision.method} of {dict(tried)} s; expected the fastest of {', '.join(TRIED)}")
    outcome = plan.outcome.get("sample_policy")
    if outcome is None or plan.evaluation is None or verdict is None:
        raise CertificationError("a sample policy without its outcome, evaluation or verdict; re-run moeplan solve")
    names = {METHODS[decision.method], "busiest_cost" if decision.method == "bottleneck" else "link_cost"}
    if outcome.objective.name not in names or outcome.objective.sense != "min":
        raise CertificationError(f"objective {outcome.objective.sense} {outcome.objective.name}; expected min {names}")
    for part in (plan.evaluation.fit, plan.evaluation.held_out):
        found = [contender.label for contender in part.contenders] if part else _labels(plan)
        if found != _labels(plan):
            raise CertificationError(f"contenders {found}; expected {_labels(plan)}: re-run moeplan solve")
    metric = judged_metric(plan, PLAN, _base(plan), _metric(plan))
    expected = (metric, _base(plan), 0.0 if metric == "step_s" else AT_LEAST)
    if (verdict.metric, verdict.against, verdict.at_least) != expected:
        raise CertificationError(
            f"verdict on {verdict.metric} against {verdict.against}, above {verdict.at_least}; expected {expected}:"
            " re-run moeplan solve"
        )
    certificate.checks.append("sample policy")


def decision_of(plan: Plan) -> SamplePolicyDecision:
    """The sample policy that a plan decides."""
    assert plan.decisions.sample_policy is not None
    return plan.decisions.sample_policy


def policy_options(plan: Plan) -> SamplePolicyOptions:
    """How the plan says it was decided."""
    try:
        return SamplePolicyOptions.model_validate(dict(plan.options.get("sample_policy", {})))
    except ValidationError as error:
        raise CertificationError(f"options.sample_policy: {error.error_count()} values missing or wrong") from error


def _labels(plan: Plan) -> list[str]:
    between = [] if plan.decisions.placement is None else ["base/standard", "contiguous/migrating"]
    blind = [] if decision_of(plan).predictor is None else [BLIND]
    return [PLAN, ORACLE, *blind, *between, STILL]


def _base(plan: Plan) -> str:
    return STILL if plan.decisions.placement is None else "base/standard"


def _metric(plan: Plan) -> str:
    """What the verdict is about where steps do not compare."""
    assert plan.evaluation is not None
    if "exchange_s" in plan.evaluation.fit.contenders[0].metrics:
        return "exchange_s"
    if plan.cluster.num_nodes == 1:
        return "device_copies"
    return "inter_bytes" if plan.model.hidden_size and plan.model.dtype_bytes else "node_copies"
