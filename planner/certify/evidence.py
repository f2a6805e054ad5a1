"""Whether a plan's evidence is of the kind that its strategies give: decisions, options, contenders, verdict."""

from collections.abc import Sequence

from ...errors import CertificationError
from ...runtime.plan import Plan
from ..strategy import STRATEGIES, Strategy
from .structure import evaluation_options, judged_metric, keeps_pairs, pipeline_options, placement_options
from .timing import check_timing

__all__ = ["check_evidence"]

PIPELINE_RIVALS = ("degree_1", "one_degree", "paper", "exact")


def check_evidence(plan: Plan) -> None:
    """Refuse a plan whose evidence does not hang together."""
    if plan.evaluation is None:
        if plan.verdict is not None:
            raise CertificationError("a verdict without an evaluation; re-run moeplan solve")
        return
    last = _strategies(plan)[-1]
    if plan.verdict is None or last.decides not in plan.outcome or not {*plan.outcome} <= {*plan.decisions.names}:
        raise CertificationError(
            f"an evaluation with outcomes of {sorted(plan.outcome)}, verdict {plan.verdict and plan.verdict.value};"
            f" expected both for {last.decides}: re-run moeplan solve"
        )
    if plan.verdict.at_least and last.decides != "sample_policy":
        raise CertificationError(f"a verdict from {plan.verdict.at_least:.1%} on; {last.name} pays from any gain on")
    split = None if plan.inputs.trace is None else plan.inputs.trace.split
    if split and last.decides != "sample_policy" and (plan.evaluation.held_out is None) != (split.fit_fraction == 1):
        raise CertificationError(f"fit fraction {split.fit_fraction} with the wrong parts")
    check_timing(plan)
    if "placement" in plan.decisions.names:
        _check_placement(plan)
    if last.decides == "placement":
        _check_contenders(plan, last, _placement_labels(plan.dispatch_model), "contiguous/standard")
    elif last.decides == "pipeline":
        rivals = [name for name in PIPELINE_RIVALS if name != pipeline_options(plan).method]
        _check_contenders(plan, last, [f"{name}/standard" for name in ("plan", *rivals)], "degree_1/standard")


def _strategies(plan: Plan) -> list[Strategy]:
    """The plan's strategies in the order they decided; one a decision, each where it may stand."""
    found = [STRATEGIES[name] for name in plan.strategies if name in STRATEGIES]
    decided = [row.decides for row in found]
    beside = found[-1].beside if found else ()
    if len(found) < len(plan.strategies) or sorted(decided) != sorted(plan.decisions.names) or not found:
        raise CertificationError(f"strategies {list(plan.strategies)} with decisions {list(plan.decisions.names)}")
    if not {*decided[:-1]} <= {*beside}:
        raise CertificationError(f"{found[-1].name} on a plan that decides {', '.join(decided[:-1])}")
    return found


def _check_placement(plan: Plan) -> None:
    """The placement was decided as its options say, and its outcome has its strategy's objective."""
    options = placement_options(plan)
    chosen = STRATEGIES.get(options.strategy)
    if (
        chosen is None
        or chosen.decides != "placement"
        or options.strategy not in plan.strategies
        or options.dispatch_model not in chosen.dispatch_models
    ):
        raise CertificationError(f"strategies {list(plan.strategies)} with options of {options.strategy!r}")
    if options.search is not None and options.strategy != "exflow":
        raise CertificationError(f"options.placement.search of {options.strategy}; only exflow searches")
    if "placement" in plan.outcome:
        _check_objective_name(plan, chosen.name)


def _check_contenders(plan: Plan, chosen: Strategy, expected: Sequence[str], against: str) -> None:
    """The contenders of both parts, and what the verdict is about."""
    assert plan.evaluation is not None
    assert plan.verdict is not None
    metric = judged_metric(plan, expected[0], against, chosen.judged_on(plan.dispatch_model, plan.cluster))
    if (plan.verdict.metric, plan.verdict.against) != (metric, against):
        raise CertificationError(
            f"verdict on {plan.verdict.metric} against {plan.verdict.against}; {chosen.name} is judged on"
            f" {metric} here, against {against}"
        )
    for part in (plan.evaluation.fit, plan.evaluation.held_out):
        found = [contender.label for contender in part.contenders] if part else expected
        if found != expected:
            raise CertificationError(f"contenders {found}; expected {expected}")


def _check_objective_name(plan: Plan, strategy: str) -> None:
    """The objective is the one its strategy has on such a cluster."""
    assert plan.decisions.placement is not None
    names, sense = _balance_names(plan), "min"
    if strategy == "exflow":
        what = ("affinity", "affinity") if keeps_pairs(plan) else ("hops", "hop")
        name, sense = (f"{what[0]}_kept", "max") if plan.cluster.num_nodes == 1 else (f"{what[1]}_cost", "min")
        if len(plan.decisions.placement.physical_to_logical[0]) > plan.model.num_experts:
            name = f"expected_{name}"
        names = (name,)
    outcome = plan.outcome["placement"]
    if outcome.objective.name not in names or outcome.objective.sense != sense or outcome.wall_s < 0:
        raise CertificationError(
            f"objective {outcome.objective.sense} {outcome.objective.name} after {outcome.wall_s} s;"
            f" expected {sense} {' or '.join(names)}"
        )


def _balance_names(plan: Plan) -> tuple[str, ...]:
    """What eplb may have made even: recorded steps, or all loads together."""
    options = placement_options(plan)
    if options.quantile is not None:
        return (f"step_balance_p{100 * options.quantile:g}",)
    by_step = options.method == "refined" and not options.mixture and evaluation_options(plan).step == "recorded"
    return ("step_balance", "balance") if by_step else ("balance",)


def _placement_labels(dispatch_model: str) -> list[str]:
    """The contenders of a placement under its dispatch model, the plan first."""
    both = ["contiguous/coherent", "plan/standard"] if dispatch_model == "coherent" else []
    return [f"plan/{dispatch_model}", "contiguous/standard", *both, "eplb/standard"]
