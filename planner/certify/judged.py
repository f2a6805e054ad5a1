"""A plan judged again: the task it was solved for, its contenders replayed naively, every figure held against them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import CertificationError, InputError, MismatchError, MoeplanError, UsageError
from ...runtime.plan import Metric, Part, Plan
from ...traces.count_form import CountTrace, open_any
from ..evaluate.evaluate import Evaluated, evaluate, verdict
from ..evaluate.metrics import METRICS
from ..evaluate.scene import Scene
from ..options import EvaluationOptions, PlacementOptions, SecondsOptions
from ..params import flags_of
from ..request import Request
from ..solve import contenders
from ..strategies.registry import STRATEGIES
from ..strategies.strategy import Strategy
from ..task import Task
from .certificate import Certificate
from .recounted import Recounted
from .structure import strategies_of

MOST_CELLS = 2**29
Mixture = tuple[tuple[str, float], ...]


def task_of(plan: Plan, chosen: Strategy, trace: str, profile: Path | None, mixture: Mixture = ()) -> Recounted:
    """The task that one of a plan's strategies was given: on what was decided before, by the parameters it names.

    Raises
    ------
    CertificationError
        They are none that the strategy takes.
    """
    assert plan.inputs.trace is not None
    options = EvaluationOptions.of(plan)
    before = strategies_of(plan)
    before = before[: before.index(chosen)]
    model = chosen.dispatch_models[0]
    if chosen.decides == "placement":
        model = plan.options.get("placement", {}).get("dispatch_model", "standard")
    if model not in chosen.dispatch_models:
        raise CertificationError(f"options of {chosen.name} under {model}; it is {' or '.join(chosen.dispatch_models)}")
    try:
        request = Request.of(
            strategy=chosen.name,
            trace=trace,
            cluster=plan.cluster,
            profile=profile,
            phases=options.phases,
            fit_fraction=plan.inputs.trace.split.fit_fraction,
            seed=plan.seed,
            samples_per_step=options.samples_per_step,
            mixture=mixture,
            **_params(plan, chosen),
        )
    except UsageError as error:
        raise CertificationError(f"options of {chosen.name}: {error}") from error
    base = None
    if before:
        kept = {one.decides: getattr(plan.decisions, one.decides) for one in before}
        names = tuple(one.name for one in before)
        base = plan.model_copy(update={"decisions": type(plan.decisions)(**kept), "strategies": names})
    lost = plan.inputs.profile is not None and profile is None
    return Recounted(request, chosen, base, model, untimed=lost)


def _params(plan: Plan, chosen: Strategy) -> dict[str, Any]:
    """Flags of the strategy, with the values that the plan stores."""
    options = dict(plan.options.get(chosen.decides, {}))
    told = getattr(plan.decisions, chosen.decides).model_dump() | (options.get("search") or {}) | options
    if not options.get("asked", True):  # the method was chosen, by what it is fast at
        told.pop("method", None)
    names = [name for name, _ in flags_of(STRATEGIES[chosen.name].params)]
    return {name: _tupled(told[name]) for name in names if name in told}


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list | tuple) else value


def mixture_of(plan: Plan, first: str, sha256: str | None) -> Mixture | None:
    """The traces of a mixture with their weights, none where there is one; None where one is gone or was changed."""
    if "placement" not in plan.options:
        return ()
    members = PlacementOptions.of(plan).mixture
    if not members or len(plan.strategies) > 1:
        return ()
    if members[0].sha256 != sha256:
        raise MismatchError(f"{first}: not the first trace of the mixture; give {members[0].path}")
    if abs(sum(one.weight for one in members) - 1) > 1e-9:
        raise CertificationError(f"a mixture of weights {[one.weight for one in members]}; expected 1 in all")
    for one in members[1:]:
        try:
            if "://" in one.path or open_any(one.path).sha256 != one.sha256:  # a plan alone opens no network address
                return None
        except MoeplanError:
            return None
    return tuple((first if one is members[0] else one.path, one.weight) for one in members)


def check_judged(
    plan: Plan, task: Recounted, certificate: Certificate, sidecars: Mapping[str, bytes], say: Callable[[str], None]
) -> Evaluated:
    """Hold every figure of the evaluation, the seconds and the verdict against a naive replay; returns it."""
    assert plan.evaluation is not None
    try:
        _check_options(plan, task, certificate)
        rows = contenders(task, plan, sidecars)
        scenes = task.scenes
        for _, scene in scenes:
            _check_size(scene)
        say("replaying the trace under the plan and its rivals, token by token")
        evaluated = evaluate(scenes, rows, replay=task.replay)
    except (InputError, UsageError) as error:
        raise CertificationError(f"what the plan decides does not go with its trace: {error}") from error
    untimed = task.untimed
    _hold("fit", plan.evaluation.fit, evaluated.evaluation.fit, certificate, untimed=untimed)
    ours, theirs = plan.evaluation.held_out, evaluated.evaluation.held_out
    if (ours is None) != (theirs is None):
        raise CertificationError("a held-out part where the trace has none, or none where it has one")
    if ours is not None and theirs is not None:
        _hold("held out", ours, theirs, certificate, untimed=untimed)
    certificate.checks.append("metrics of every contender")
    _check_seconds(plan, evaluated, certificate, untimed=untimed)
    _check_verdict(plan, task, evaluated, rows[1].label, certificate, untimed=untimed)
    return evaluated


def _check_size(scene: Scene) -> None:
    layers, devices = scene.model.num_layers, scene.cluster.num_devices
    for cohort in scene.cohorts:
        cells = cohort.num_steps * layers * devices * (11 if scene.costs is not None else 1)
        if cells > MOST_CELLS:
            raise MismatchError(
                f"a recount of {cohort.num_steps:,} steps, {layers} layers and {devices:,} devices needs {cells:,}"
                f" numbers; expected at most {MOST_CELLS:,}: certify without the trace, which checks the structure only"
            )


def _check_options(plan: Plan, task: Task, certificate: Certificate) -> None:
    claimed = EvaluationOptions.of(plan)
    if claimed != task.evaluation_options:
        raise CertificationError(
            f"options.evaluation: {claimed.unit}, {claimed.home}, {claimed.step}; the trace gives"
            f" {task.evaluation_options.unit}, {task.evaluation_options.home}, {task.evaluation_options.step}"
        )
    assert plan.inputs.trace is not None
    if isinstance(task.source, CountTrace):
        certificate.agree("tokens of the trace", plan.inputs.trace.num_tokens, int(task.index.unit_tokens.sum()))


def _hold(name: str, claimed: Part, found: Part, certificate: Certificate, *, untimed: bool) -> None:
    """Refuse a part that is not what was found."""
    for what in ("num_tokens", "num_samples", "num_steps", "dropped_samples"):
        words = what.removeprefix("num_").replace("_", " ")
        certificate.agree(f"{name}: {words}", getattr(claimed, what), getattr(found, what))
    labels = [one.label for one in found.contenders]
    if [one.label for one in claimed.contenders] != labels:
        raise CertificationError(f"{name}: contenders {[one.label for one in claimed.contenders]}; expected {labels}")
    for ours, theirs in zip(claimed.contenders, found.contenders, strict=True):
        metrics = {key: one for key, one in ours.metrics.items() if not (untimed and _is_timed(key))}
        if metrics.keys() != theirs.metrics.keys():
            raise CertificationError(
                f"{name}: {ours.label}: metrics {sorted(metrics)}; the recount gives {sorted(theirs.metrics)}"
            )
        for key, one in metrics.items():
            _agree(f"{name}: {ours.label}: {key}", one, theirs.metrics[key], certificate)


def _is_timed(name: str) -> bool:
    """Whether a metric follows from a profile."""
    return name not in METRICS or METRICS[name].unit == "seconds"


def _agree(what: str, claimed: Metric, found: Metric, certificate: Certificate) -> None:
    certificate.agree(what, claimed.value, found.value)
    certificate.agree(f"{what} low", claimed.low, found.low)
    certificate.agree(f"{what} high", claimed.high, found.high)


def _check_seconds(plan: Plan, evaluated: Evaluated, certificate: Certificate, *, untimed: bool) -> None:
    """The curves that the plan names, and how often they were stretched."""
    if "seconds" not in plan.options:
        return
    if untimed:
        certificate.unchecked.append("predicted seconds (give the plan's profile)")
        return
    claimed, found = SecondsOptions.of(plan), evaluated.seconds
    assert found is not None
    for name in ("sources", "missing", "other_dtype"):
        if getattr(claimed, name) != getattr(found, name):
            raise CertificationError(
                f"options.seconds.{name}: {getattr(claimed, name)!s:.200}; profile and links give"
                f" {getattr(found, name)!s:.200}"
            )
    for name in sorted({*claimed.extrapolated, *found.extrapolated}):
        certificate.agree(f"extrapolated {name}", claimed.extrapolated.get(name), found.extrapolated.get(name))
    certificate.checks.append("predicted seconds")


def _check_verdict(
    plan: Plan, task: Task, evaluated: Evaluated, against: str, certificate: Certificate, *, untimed: bool
) -> None:
    """The gain of the plan, and what it is called."""
    claimed = plan.verdict
    assert claimed is not None
    metric = claimed.metric if untimed else task.strategy.judged_on(task.scene, plan.dispatch_model)
    if untimed and _is_timed(metric):
        certificate.unchecked.append("the gain of the verdict")
        return
    found = verdict(evaluated, metric, against=against, at_least=task.strategy.pays_from)
    if (claimed.metric, claimed.against, claimed.at_least) != (found.metric, found.against, found.at_least):
        raise CertificationError(
            f"verdict on {claimed.metric} against {claimed.against} from {claimed.at_least} on; {task.strategy.name} is"
            f" judged on {found.metric} here, against {found.against}, from {found.at_least} on"
        )
    _agree("gain", claimed.gain, found.gain, certificate)
    if claimed.value != found.value:
        raise CertificationError(f"verdict {claimed.value}; the recount gives {found.value}")
    certificate.checks.append("verdict")
