"""A plan judged again: its contenders replayed naively, and every figure, second and gain held against them."""

from collections.abc import Callable, Mapping, Sequence

from ...errors import CertificationError, InputError, UsageError
from ...runtime.plan import Metric, Part, Plan, SizedGain
from ...traces.count_form import CountTrace
from ..evaluate.evaluate import Evaluated, evaluate, verdict
from ..evaluate.journey import Contender
from ..evaluate.metrics import is_timed
from ..options import EvaluationOptions, SecondsOptions
from ..solve import contenders, sizes
from .certificate import Certificate
from .recounted import Recounted


def check_judged(
    plan: Plan,
    task: Recounted,
    certificate: Certificate,
    sidecars: Mapping[str, bytes],
    say: Callable[[str], None],
    *,
    keep: bool = False,
) -> Evaluated:
    """Hold every figure of the evaluation, the seconds and the verdict against a naive replay; returns it."""
    assert plan.evaluation is not None
    try:
        ours, theirs = EvaluationOptions.of(plan), task.evaluation_options
        if differing := [name for name in type(ours).model_fields if getattr(ours, name) != getattr(theirs, name)]:
            says, gives = ({name: getattr(options, name) for name in differing} for options in (ours, theirs))
            raise CertificationError(f"options.evaluation: {says}; the trace gives {gives}")
        if theirs.use != task.use_for(None):
            certificate.unchecked.append(f"that it was planned for {theirs.use} (--for)")
        if isinstance(task.source, CountTrace) and plan.inputs.trace is not None:
            certificate.agree("tokens of the trace", plan.inputs.trace.num_tokens, int(task.index.unit_tokens.sum()))
        rows = contenders(task, plan, sidecars)
        say("replaying the trace under the plan and its rivals, token by token")
        evaluated = evaluate(task.scenes, rows, replay=task.replay, keep=keep)
    except (InputError, UsageError) as error:
        raise CertificationError(f"what the plan decides does not go with its trace: {error}") from error
    stated, recount = plan.evaluation, evaluated.evaluation
    for name, claimed, recounted in (("fit", stated.fit, recount.fit), ("held out", stated.held_out, recount.held_out)):
        if (claimed is None) != (recounted is None):
            raise CertificationError("a held-out part where the trace has none, or none where it has one")
        if claimed is not None and recounted is not None:
            _check_part(name, claimed, recounted, task, certificate)
    certificate.checks.append("metrics of every contender")
    if task.untimed and "seconds" in plan.options:
        certificate.unchecked.append("predicted seconds (give the plan's profile)")
    elif "seconds" in plan.options:
        _check_seconds(SecondsOptions.of(plan), evaluated.seconds, certificate)
    _check_verdict(plan, task, evaluated, rows[:2], certificate)
    return evaluated


def _check_part(name: str, claimed: Part, recounted: Part, task: Recounted, certificate: Certificate) -> None:
    """Refuse a part that differs from the recount."""
    for what in ("num_tokens", "num_samples", "num_steps", "dropped_samples"):
        words = what.removeprefix("num_").replace("_", " ")
        certificate.agree(f"{name}: {words}", getattr(claimed, what), getattr(recounted, what))
    certificate.agree(f"{name}: tokens per step", claimed.tokens_per_step, recounted.tokens_per_step)
    labels = [contender.label for contender in recounted.contenders]
    if [contender.label for contender in claimed.contenders] != labels:
        raise CertificationError(
            f"{name}: contenders {[contender.label for contender in claimed.contenders]}; expected {labels}"
        )
    for ours, theirs in zip(claimed.contenders, recounted.contenders, strict=True):
        metrics = {key: metric for key, metric in ours.metrics.items() if not (task.untimed and is_timed(key))}
        if metrics.keys() != theirs.metrics.keys():
            raise CertificationError(
                f"{name}: {ours.label}: metrics {sorted(metrics)}; the recount gives {sorted(theirs.metrics)}"
            )
        for key, metric in metrics.items():
            _agree(f"{name}: {ours.label}: {key}", metric, theirs.metrics[key], certificate)


def _agree(what: str, claimed: Metric, recounted: Metric, certificate: Certificate) -> None:
    certificate.agree(what, claimed.value, recounted.value)
    certificate.agree(f"{what} low", claimed.low, recounted.low)
    certificate.agree(f"{what} high", claimed.high, recounted.high)


def _check_seconds(claimed: SecondsOptions, recounted: SecondsOptions | None, certificate: Certificate) -> None:
    """The curves that the plan names, and how often they were stretched."""
    assert recounted is not None
    for name in ("sources", "missing", "other_dtype", "noisy"):
        if getattr(claimed, name) != getattr(recounted, name):
            raise CertificationError(
                f"options.seconds.{name}: {getattr(claimed, name)!s:.200}; profile and links give"
                f" {getattr(recounted, name)!s:.200}"
            )
    for name in sorted({*claimed.extrapolated, *recounted.extrapolated}):
        certificate.agree(f"extrapolated {name}", claimed.extrapolated.get(name), recounted.extrapolated.get(name))
    certificate.checks.append("predicted seconds")


def _check_verdict(
    plan: Plan, task: Recounted, evaluated: Evaluated, rivals: Sequence[Contender], certificate: Certificate
) -> None:
    """Check the gain of the plan over its baseline, at every size of a step, and the verdict."""
    claimed, against = plan.verdict, rivals[1].label
    assert claimed is not None
    metric = claimed.metric if task.untimed else task.strategy.judged_on(task.scene, plan.dispatch_model)
    if task.untimed and is_timed(metric):
        certificate.unchecked.append("the gain of the verdict")
        return
    recounted = verdict(evaluated, metric, against=against, at_least=task.strategy.min_gain)
    if (claimed.metric, claimed.against, claimed.at_least) != (recounted.metric, recounted.against, recounted.at_least):
        raise CertificationError(
            f"verdict on {claimed.metric} against {claimed.against} from {claimed.at_least} on; {task.strategy.name} is"
            f" judged on {recounted.metric} here, against {recounted.against}, from {recounted.at_least} on"
        )
    _agree("gain", claimed.gain, recounted.gain, certificate)
    nothing = Metric(value=0.0)  # of a baseline of 0
    _agree("gain as a share", claimed.share or nothing, recounted.share or nothing, certificate)
    if claimed.value != recounted.value:
        raise CertificationError(f"verdict {claimed.value}; the recount gives {recounted.value}")
    certificate.checks.append("verdict")
    if claimed.sizes:
        _check_sizes(claimed.sizes, sizes(task, rivals, evaluated, recounted.metric), certificate)


def _check_sizes(claimed: Sequence[SizedGain], recounted: Sequence[SizedGain], certificate: Certificate) -> None:
    """The gains at other sizes of a step."""
    certificate.agree("sizes of a step in the verdict", len(claimed), len(recounted))
    for ours, theirs in zip(claimed, recounted, strict=True):
        certificate.agree("tokens of a step in the verdict", ours.tokens_per_step, theirs.tokens_per_step)
        _agree(f"gain at {ours.tokens_per_step:,.0f} tokens per step", ours.share, theirs.share, certificate)
    certificate.checks.append("gains by size of a step")
