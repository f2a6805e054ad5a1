"""Checks of a plan without its trace: placement rules, outcome arithmetic, consistency of the evidence."""

from typing import Any, cast

import numpy as np

from ...errors import CertificationError, InputError
from ...profilers.fits.fit import Prediction
from ...runtime.plan import Contender, Plan
from ...solvers.outcome import Outcome, Status
from ..evaluate.cohort import Cohort
from ..evaluate.costs import ENCODING, CostModel
from ..evaluate.evaluate import MATTERS
from ..evaluate.journey import Journey, passes_of, today
from ..evaluate.metrics import ATTENTION, COUNTS, DROPPED, HOME, figures_of, is_timed
from ..evaluate.price import STEP, price
from ..evaluate.scene import Scene
from ..evaluate.sums import Context
from ..evaluate.tally import Tally
from ..options import EvaluationOptions, SecondsOptions
from ..strategies.auto.options import AutoOptions
from ..strategies.registry import decided_by
from ..strategies.strategy import Strategy
from .certificate import TOLERANCE, Certificate

PARTS = ("dispatch", "kv", "experts", "attention")  # of a step, that something times or that are missing


def check_structure(plan: Plan, certificate: Certificate) -> None:
    """Refuse a plan that breaks a rule, or whose figures contradict one another."""
    if plan.decisions.placement is not None:
        certificate.checks.append("placement rules")  # by which a plan is read
    for decision, outcome in plan.outcome.items():
        _check_arithmetic(decision, outcome, certificate)
    strategies_of(plan)
    if plan.evaluation is None:
        if plan.verdict is not None:
            raise CertificationError("a verdict without an evaluation; re-run moeplan solve")
        return
    try:
        _check_seconds(plan)
        _check_evidence(plan)
    except InputError as error:  # options that cannot be read
        raise CertificationError(str(error)) from error


def strategies_of(plan: Plan) -> list[Strategy]:
    """The plan's strategies in the order they decided; one per decision, each where it may stand.

    A plan made by hand names none, and claims nothing.
    """
    if not plan.strategies and not plan.outcome and plan.evaluation is None:
        return []
    strategies = decided_by(plan)
    decided = [chosen.decides for chosen in strategies]
    if not decided or len(decided) < len(plan.strategies) or sorted(decided) != sorted(plan.decisions.names):
        raise CertificationError(f"strategies {[*plan.strategies]} with decisions {[*plan.decisions.names]}")
    for number, chosen in enumerate(strategies):
        if not {*decided[:number]} <= chosen.beside:
            raise CertificationError(f"{chosen.name} on a plan that decides {', '.join(decided[:number])}")
    return strategies


def _check_arithmetic(decision: str, outcome: Outcome, certificate: Certificate) -> None:
    """A value is never better than its bound, the gap follows from both, and optimal means that they meet."""
    value, bound = outcome.objective.value, outcome.bound
    if bound is None:
        if outcome.gap is not None or outcome.bound_kind is not None or outcome.status is Status.OPTIMAL:
            raise CertificationError(f"outcome of {decision}: a gap, a kind of bound or an optimum without a bound")
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
    """Outcome, parts, contenders and verdict belong to the strategies and to one another."""
    last, evaluation, verdict = strategies_of(plan)[-1], plan.evaluation, plan.verdict
    assert evaluation is not None
    if (plan.inputs.base is None) != (len(plan.strategies) == 1 or AutoOptions.key in plan.options):
        raise CertificationError(f"strategies {[*plan.strategies]} {'with' if plan.inputs.base else 'without'} a base")
    model = plan.dispatch_model if last.decides == "placement" else "standard"
    if plan.options.get("placement", {}).get("dispatch_model", model) != model:
        raise CertificationError(f"options.placement.dispatch_model: expected {model}, under which it was decided")
    if verdict is None or last.decides not in plan.outcome or not {*plan.outcome} <= {*plan.decisions.names}:
        raise CertificationError(
            f"an evaluation with outcomes of {sorted(plan.outcome)}, verdict {verdict and verdict.value};"
            f" expected both for {last.decides}: re-run moeplan solve"
        )
    split = None if plan.inputs.trace is None else plan.inputs.trace.split
    if split is not None and split.seed != plan.seed:
        raise CertificationError(f"seed {plan.seed} with a split by seed {split.seed}")
    if split is not None and (evaluation.held_out is None) != (split.fit_fraction == 1):
        raise CertificationError(f"fit fraction {split.fit_fraction} with the wrong parts")
    EvaluationOptions.of(plan)
    usual = today(plan.model, plan.cluster, None if plan.placement is None else plan.placement.slots).label
    labels = [one.label for one in evaluation.judging.contenders]
    if labels[:2] != [f"plan/{plan.dispatch_model}", usual] or len({*labels}) < len(labels):
        raise CertificationError(f"contenders {labels}; expected plan/{plan.dispatch_model}, {usual} and others once")
    if [one.label for one in evaluation.fit.contenders] != labels:
        raise CertificationError(f"contenders {labels} of one part; expected those of the other")
    whole = verdict.metric == STEP and ATTENTION in evaluation.judging.contenders[1].metrics
    _check_verdict(plan, usual, 0.0 if whole else last.min_gain)


def _check_verdict(plan: Plan, usual: str, at_least: float) -> None:
    """The gain is the difference of the plan's figure and today's, and the verdict follows from it."""
    assert plan.evaluation is not None
    assert plan.verdict is not None
    verdict, rows = plan.verdict, {one.label: one.metrics for one in plan.evaluation.judging.contenders}
    ours, theirs = (rows[label].get(verdict.metric) for label in (f"plan/{plan.dispatch_model}", usual))
    if verdict.against != usual or ours is None or theirs is None or verdict.at_least != at_least:
        raise CertificationError(
            f"verdict on {verdict.metric} against {verdict.against} from {verdict.at_least} on; expected a metric of"
            f" both, against {usual}, from {at_least} on"
        )
    Certificate().agree("gain of the verdict", verdict.gain.value, theirs.value - ours.value)
    if verdict.share is not None and theirs.value:
        Certificate().agree("gain as a share", verdict.share.value, 1 - ours.value / theirs.value)
    low, least, matters = verdict.gain.low, verdict.at_least * theirs.value, MATTERS * theirs.value
    if (verdict.value == "benefit") != (low is not None and low > least and verdict.gain.value >= matters):
        raise CertificationError(
            f"verdict {verdict.value} with a gain of {verdict.gain.value:g} from {low}; a benefit needs one above"
            f" {least:g}, and {matters:g} at least"
        )


#: Seconds that steps have or not by what an empty one does not tell, and the recount does: counts where steps are split
#: by them, a way home where steps are not of single tokens
BY_STEPS = {"standard": {COUNTS}, "coherent": {HOME}, "migrating": set[str]()}


def _check_seconds(plan: Plan) -> None:
    """Refuse a plan whose seconds are not those that its profile and links give, or are impossible."""
    could = plan.inputs.profile is not None or bool(plan.cluster.links)
    if ("seconds" in plan.options) != could:
        words = ("no", "with") if could else ("with", "without")
        raise CertificationError(
            f"{words[0]} options.seconds in a plan made {words[1]} profile or links; re-run moeplan solve"
        )
    assert plan.evaluation is not None
    for part in filter(None, (plan.evaluation.fit, plan.evaluation.held_out)):
        for one in part.contenders:
            for name, metric in one.metrics.items():
                ends = [number for number in (metric.low, metric.high) if number is not None]
                if len(ends) == 1 or ends != sorted(ends) or min([metric.value, *ends]) < 0:
                    raise CertificationError(
                        f"{one.label}: {name} {metric.value} from {metric.low} to {metric.high}; expected a rising"
                        " interval of figures (seconds too) of at least 0"
                    )
            given = set(filter(is_timed, one.metrics))
            expected = seconds_names(plan, one) if could else set()
            if (given ^ expected) - BY_STEPS[one.dispatch_model]:
                raise CertificationError(
                    f"{one.label}: seconds {sorted(given)}; what times it gives {sorted(expected)}: other metrics or"
                    " seconds than the plan's"
                )


def seconds_names(plan: Plan, one: Contender) -> set[str]:
    """Names of the metrics of seconds that a contender must have, by the price of an empty step under free curves."""
    seconds = SecondsOptions.of(plan)
    timed = {source.split()[0] for source in seconds.sources if source} - {ENCODING}  # within dispatch and combine
    missing = {*seconds.missing} - {ENCODING}
    if timed & missing or timed | missing != {*PARTS}:
        raise CertificationError(
            f"options.seconds: sources of {sorted(timed)}, missing {sorted(seconds.missing)}; expected each of"
            f" {', '.join(PARTS)} once"
        )
    cluster, passes = plan.cluster, passes_of(plan)
    if plan.decisions.pipeline is not None and plan.model.copy_bytes is None:
        raise CertificationError(
            "chunks are timed, but the model has no hidden_size or dtype_bytes; expected both; re-run moeplan solve"
        )
    links = [_free] * ((cluster.devices_per_node > 1) + (cluster.num_nodes > 1))
    costs = CostModel(
        exchange=links if "dispatch" in timed else None,
        gather=links if "kv" in timed else None,
        experts=_free if "experts" in timed else None,
        attention=_free if "attention" in timed else None,
    )
    scene = Scene(cast(Any, None), cast(Any, None), (), cluster, plan.model, costs, 0, passes=passes)
    one_token, step = np.ones(1, np.int64), np.zeros(1, np.int64)
    factor = 1.0 if DROPPED in one.metrics else None  # whichever: of fixed buffers nothing is ideal
    journey = Journey(one.dispatch_model, today(plan.model, cluster).journey.placement, capacity_factor=factor)
    tally = Tally.empty(journey, Cohort(step, one_token, None, step), cluster, ports=True)
    tally.counts[0, 0] = 1
    context = Context(tally, price(tally, journey, scene), one.dispatch_model, plan.model, 1.0)
    (figures,) = figures_of([context], seed=0)
    return set(filter(is_timed, figures.summands))


def _free(first: Any, *_: Any) -> Prediction:
    nothing = np.zeros(np.shape(first))
    return Prediction(nothing, nothing, nothing, nothing.astype(bool))
