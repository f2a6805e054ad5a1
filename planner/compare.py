"""Comparison of plans on any trace of their model: side by side, each against today and against the first."""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import UsageError
from ..profilers.cluster import Cluster
from ..profilers.profile import load as load_profile
from ..runtime.exports import ENGINES
from ..runtime.plan import Metric, Part, Plan, Verdict
from ..runtime.wire import copy_bytes
from ..solvers.arrays import Floats
from ..solvers.moves import experts_moved
from ..solvers.placement import BY_STEP
from ..solvers.replicas import ReplayRule
from ..traces.count_form import CountTrace, open_any
from ..traces.reader import Trace
from .evaluate.evaluate import Evaluated, evaluate, verdict
from .evaluate.journey import Contender, distinct, pads_in
from .evaluate.metrics import COPIES
from .evaluate.price import STEP
from .evaluate.rebalancing import check_steps
from .evaluate.replay import step_loads
from .evaluate.scene import Scene
from .evaluate.split_bounds import SplitBound, split_bounds
from .evaluate.step_size import StepSize, Use, as_prompts, use_of, usual_size
from .evaluate.tally import Tally
from .evaluate.units import SampleIndex, UnitIndex, index_samples, index_units
from .loaded_plan import LoadedPlan, common_cluster, common_passes, known_model, load_plans, made_with
from .options import EvaluationOptions, SecondsOptions
from .request import Phase
from .strategies.registry import STRATEGIES


@dataclass(frozen=True, slots=True)
class Moves:
    """The moves from one placement to another: experts that devices are sent, of all held, and their bytes."""

    experts: int
    held: int
    num_bytes: int | None  #: None where the sizes of the model are not known


@dataclass(frozen=True, slots=True)
class Compared:
    """A plan on the trace."""

    path: str
    plan: Plan
    label: str  #: Its contender's label
    verdict: Verdict  #: Whether it still pays: against today
    #: against_first, moves: how it stands to the first plan, and what it takes to replace that one by it
    against_first: Verdict | None = None
    moves: Moves | None = None

    @property
    def claimed(self) -> Metric | None:
        """The gain that it was solved with; None where that was of another metric."""
        solved = self.plan.verdict
        return solved.gain if solved is not None and solved.metric == self.verdict.metric else None

    @property
    def gain_over_same(self) -> float | None:
        """Gain, when solved, over the baseline of today's verdict. None where the two were not judged together."""
        if (evaluation := self.plan.evaluation) is None:
            return None
        rows = {
            contender.label: contender.metrics.get(self.verdict.metric) for contender in evaluation.judging.contenders
        }
        ours, theirs = next(iter(rows.values())), rows.get(self.verdict.against)
        return theirs.value - ours.value if ours and theirs else None

    @property
    def size_when_solved(self) -> StepSize | None:
        """Size of the steps that it was solved for; None where these were recorded, or are not known."""
        return EvaluationOptions.of(self.plan).size if EvaluationOptions.key in self.plan.options else None

    @property
    def paid_when_solved(self) -> bool:
        """Check whether it had a benefit, when solved, over the baseline of today, where that was judged beside it."""
        solved, over = self.plan.verdict, self.gain_over_same
        return solved is not None and solved.value == "benefit" and (over is None or over > 0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plans on a trace."""

    trace: str
    trace_sha256: str
    cluster: Cluster
    size: StepSize | None  #: Of a step; None where steps were recorded
    use: Use | None  #: What runs
    as_prompts: bool  #: Whether decoded tokens stand for those of prompts
    part: Part  #: The contenders: the plans, then their baselines
    compared: tuple[Compared, ...]
    #: unit, num_fitted: what judges, and how many of them were left out because a plan was fitted to them
    unit: str
    num_fitted: int
    seen: bool  #: Whether nothing else was left, so that plans are judged on what they were fitted to
    seconds: SecondsOptions | None  #: How seconds were predicted; None without
    #: Cluster of the profile, where that is another than the plans' and not the first plan's own; else None
    profiled: Cluster | None = None
    profile: str | None = None  #: What times the parts of a step
    #: Contender to the bytes of a copy of it, where sizes of the model are known
    copy_bytes: Mapping[str, int] = field(default_factory=dict)
    #: Which replica a token uses, as an engine has it; None: as each plan has it
    replica_rule: ReplayRule | None = None
    fills: bool = False  #: Whether shared experts are load, where SGLang's waterfill puts them
    #: Plans' contenders to what bounds every layer, where steps are split exactly
    bounds: Mapping[str, Sequence[SplitBound]] = field(default_factory=dict)
    tallies: Mapping[str, Tally] = field(default_factory=dict)  #: Of every contender, where these were to be kept

    @property
    def between(self) -> dict[str, Floats]:
        """Contender to the copies per step from every device to every other one, `[D, D]`, where these were kept."""
        known = {label: tally.between_per_step for label, tally in self.tallies.items()}
        return {label: copies_DD for label, copies_DD in known.items() if copies_DD is not None}

    @property
    def resampled(self) -> str:
        """Unit of resampling of the intervals of shares and copies. Intervals of seconds and balance resample steps."""
        return "step" if any(row.plan.decisions.sample_policy for row in self.compared) else self.unit

    @property
    def failing(self) -> list[str]:
        """The plans that do not pay here, by their paths."""
        return [row.path for row in self.compared if row.verdict.value == "none"]

    @property
    def again(self) -> str:
        """The command that plans anew for what is compared here, and for the engine that the first plan is for."""
        filling = next((name for name, one in ENGINES.items() if one.fills), None) if self.fills else None
        engine = self.compared[0].plan.options.get("auto", {}).get("engine") or filling
        given = {"--profile": self.profile, "--engine": engine}
        if self.size is not None:
            given[self.size.flag] = str(self.size.number)
        flags = [f" {flag} {value}" for flag, value in given.items() if value] + [" --waterfill"] * self.fills
        return f"moeplan solve --trace {self.trace}{''.join(flags)}"

    @property
    def advice(self) -> str:
        """Advice about plans that do not pay."""
        failing = [row for row in self.compared if row.verdict.value == "none"]
        if all(row.verdict.gain.low is None for row in failing):
            return "one step shows nothing: record more"
        if self.size is not None and all(row.size_when_solved not in (None, self.size) for row in failing):
            return f"solve for this step size: {self.again}"
        if all(row.plan.inputs.trace and row.plan.inputs.trace.sha256 == self.trace_sha256 for row in failing):
            return "it was solved on this very trace: record more, or keep what runs today"
        replanning = [(name,) for name, row in STRATEGIES.items() if row.params.replans]
        placed = [row for row in failing if row.paid_when_solved and row.plan.strategies in replanning]
        if not placed:
            return f"solve anew: {self.again}"
        first, (strategy,) = placed[0].path, placed[0].plan.strategies
        return f"re-plan: moeplan solve --strategy {strategy} --from {first} --trace {self.trace} -o next.json"


def compare(
    plans: Sequence[str | os.PathLike[str]],
    trace: str | os.PathLike[str],
    *,
    profile: str | os.PathLike[str] | None = None,
    phases: Sequence[Phase] = (),
    size: StepSize | None = None,
    replica_rule: ReplayRule | None = None,
    waterfill: bool = False,
    keep: bool = False,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Evaluate plans side by side on a trace, theirs or another.

    Parameters
    ----------
    trace
        Of tokens; of counts, too, where every plan moves samples, or every one places experts and is judged by loads.
    profile
        Profile that times the parts of a step; None: links alone, where the first plan's cluster has them.
    phases
        Only tokens of these phases count; empty: all.
    size
        Of a step where none were recorded; None: as the first plan was judged, else usual for the trace's phases.
    replica_rule
        Which replica a token uses, as an engine has it; None: as each plan has it.
    waterfill
        Whether shared experts are load, where SGLang's waterfill puts them; else as all plans were judged.
    keep
        Keep the tallies, with the copies of every pair of devices.

    Raises
    ------
    UsageError
        A plan that cannot be compared, or not beside the others; no plan.
    MismatchError
        The trace is of another model than a plan.
    """
    loaded = load_plans(plans, replica_rule)
    first, measured = loaded[0].plan, None if profile is None else load_profile(profile)
    known = profile is not None and made_with(first, profile)
    described = None if measured is None or known else measured.cluster
    cluster = common_cluster(loaded, described, timed=measured is not None)
    on_progress("reading the trace")
    source = open_any(trace)
    fills = _fills(loaded, waterfill)
    loaded = [replace(plan, by_counts=isinstance(source, CountTrace), fills=fills) for plan in loaded]
    for plan in loaded:
        plan.check_model(source)
    _check(source, loaded, replica_rule)
    index = _index(loaded, source, phases, cluster.num_devices)
    own = first.inputs.trace is not None and first.inputs.trace.sha256 == source.sha256
    whole = isinstance(index, SampleIndex) or index.kind != "sample"
    use, size = _steps(first, index, size, whole=whole, own=own)
    unseen_U = np.logical_and.reduce([plan.unseen(index, source.sha256, phases) for plan in loaded])
    scene = Scene.of(
        source,
        index,
        [unseen_U if unseen_U.any() else ~unseen_U],
        cluster,
        size=size,
        profile=measured,
        model=known_model(source.meta.model, [plan.plan for plan in loaded]),
        seed=seed,
        phases=phases,
        passes=common_passes(loaded),
        padded=any(pads_in(plan.plan) for plan in loaded),
        fills=fills,
    )
    on_progress("replaying the trace under the plans and what they are held against")
    contenders = _contenders(loaded)
    evaluated = evaluate(scene, contenders, keep=keep)
    sizes = {contender.label: copy_bytes(scene.model, contender.journey.wire) for contender in contenders}
    return Comparison(
        trace=str(trace),
        trace_sha256=source.sha256,
        cluster=cluster,
        size=None if "step" in source.known else size,
        use=use,
        as_prompts=as_prompts(index.phases, use),
        part=evaluated.evaluation.fit,
        compared=tuple(_compared(plan, loaded[0], evaluated, scene) for plan in loaded),
        unit=scene.index.kind,
        num_fitted=int((~unseen_U).sum()),
        seen=not unseen_U.any(),
        seconds=evaluated.seconds,
        profile=None if profile is None else str(profile),
        profiled=None if described is None or str(described) == str(cluster) else described,
        copy_bytes={label: size for label, size in sizes.items() if size is not None},
        replica_rule=replica_rule,
        fills=fills,
        bounds=_bounds(loaded, scene),
        tallies=evaluated.tallies,
    )


def _index(
    plans: Sequence[LoadedPlan], source: Trace | CountTrace, phases: Sequence[Phase], num_devices: int
) -> UnitIndex | SampleIndex:
    """Index of the units that judge plans: whole samples where plans move these, steps where plans go by time."""
    if any(plan.moves_samples for plan in plans):
        return index_samples(source, phases=phases or None)
    by_time = any(plan.strategy.by_time for plan in plans)
    index = index_units(source, phases=phases or None, by_step=by_time)
    if by_time:
        check_steps(source, index.num_source_ranks, num_devices, plans[0].path)
    return index


def _steps(
    first: Plan, index: UnitIndex | SampleIndex, size: StepSize | None, *, whole: bool, own: bool
) -> tuple[Use | None, StepSize]:
    """Use and size of steps: as given, else as the first plan was judged, else the usual ones.

    A plan's size serves neither concurrent sequences where only `whole` samples are known, nor decode otherwise, unless
    it was so judged on this trace, its `own`, or on decoded tokens that stood for prompts.
    """
    judged = EvaluationOptions.of(first) if "evaluation" in first.options else None
    purpose = "training" if judged is not None and judged.use == "training" else None
    usual = use_of(index.phases, None, purpose, whole=whole)
    if size is None and judged is not None and judged.size is not None:
        sequences, decodes = judged.size.unit == "sequences", usual == "decode" and not (own or judged.as_prompts)
        size = judged.size if (sequences and not whole) or not (sequences or decodes) else None
    size = size or usual_size(usual, first.cluster.num_devices)
    return use_of(index.phases, size, purpose, whole=whole), size


def _fills(plans: Sequence[LoadedPlan], asked: bool) -> bool:
    """Check whether shared experts count as load for all plans: where asked for, or as when they were solved."""
    judged = {one.plan.fills: one.path for one in plans}
    if not asked and len(judged) > 1:
        raise UsageError(
            f"{judged[True]} was judged with --waterfill, {judged[False]} was not; give --waterfill to judge all by it"
        )
    fills = asked or True in judged
    for one in plans if fills else ():
        decided, wire = {*one.plan.decisions.names}, one.plan.decisions.wire
        if decided != {"placement"} or one.plan.dispatch_model != "standard" or wire is not None:
            raise UsageError(
                f"--waterfill with {one.path}, which decides {' and '.join(decided) or 'nothing'} for"
                f" {one.plan.dispatch_model} dispatch{'' if wire is None else f' of {wire} rows'}; expected plans of a"
                " placement alone, for standard dispatch, as SGLang carries them out"
            )
    return fills


def _contenders(plans: Sequence[LoadedPlan]) -> list[Contender]:
    """Every contender once, the plans first; slots alone by their rule where plans choose replicas by several."""
    own, beside = [plan.contender for plan in plans], [baseline for plan in plans for baseline in plan.beside]
    if ambiguous := {contender.label for contender in own} & {contender.label for contender in beside}:
        raise UsageError(f"{min(ambiguous)}: a plan by the name of what plans are held against; rename the plan's file")
    rules = defaultdict[str, set[str]](set)
    for one in beside:
        rules[one.label].add(one.journey.rule)
    named = (one.named(f"{one.name}, {one.journey.rule}") if len(rules[one.label]) > 1 else one for one in beside)
    return distinct([*own, *named])


def _check(trace: Trace | CountTrace, plans: Sequence[LoadedPlan], rule: ReplayRule | None) -> None:
    """Refuse questions that the trace or one of the plans cannot answer."""
    by_counts, moving = isinstance(trace, CountTrace), [plan.path for plan in plans if plan.moves_samples]
    follows = [plan.path for plan in plans if plan.strategy.by_time]
    if follows and moving:
        raise UsageError(f"{follows[0]} goes by steps, and {moving[0]} by samples; compare them one at a time")
    if follows and rule is not None:
        raise UsageError(f"--replica-rule with {follows[0]}, which has its own; leave it out")
    cutting = [plan.path for plan in plans if plan.plan.decisions.pipeline is not None and not plan.moves_samples]
    if by_counts and cutting:
        what = f"what exchanges carry, which {cutting[0]} cuts into chunks; give a trace of tokens"
        raise UsageError(f"{trace.path}: counts do not say {what}")
    if rule is not None and moving:
        raise UsageError(f"--replica-rule with {moving[0]}, which moves samples and has its own; leave it out")
    if rule not in (None, "even", *BY_STEP) and by_counts:
        raise UsageError(
            f"--replica-rule {rule} goes by where tokens come from, and {trace.path} holds counts alone; expected even,"
            " lp or quota, or a trace of tokens"
        )
    coherent = [plan.path for plan in plans if plan.plan.dispatch_model != "standard"]
    if rule in BY_STEP and coherent:
        raise UsageError(
            f"--replica-rule {rule} with {coherent[0]}, whose tokens do not return home after each layer; leave one out"
        )


def _bounds(plans: Sequence[LoadedPlan], scene: Scene) -> dict[str, list[SplitBound]]:
    """Bounds of the plans whose steps are split exactly, by label."""
    stay = [contender for plan in plans if (contender := plan.contender).journey.following is None]
    split = [
        contender
        for contender in stay
        if contender.journey.rule in BY_STEP and contender.journey.placement.has_replicas
    ]
    (loads_BLE,) = step_loads(scene) if split else [np.zeros(0, np.int64)]
    return {contender.label: split_bounds(loads_BLE, contender.journey.placement) for contender in split}


def _compared(plan: LoadedPlan, first: LoadedPlan, evaluated: Evaluated, scene: Scene) -> Compared:
    """A plan against today and, but the first itself, against the first."""
    label, base, new = plan.contender.label, first.contender, plan.contender.journey.placement
    metric, at_least = plan.judged_on(scene), plan.strategy.min_gain
    today = verdict(evaluated, metric, against=plan.beside[0].label, of=label, at_least=at_least)
    if plan is first:
        return Compared(plan.path, plan.plan, label, today)
    judged, expert_bytes = first.judged_on(scene), scene.model.expert_bytes
    against_first = verdict(evaluated, COPIES if judged == STEP else judged, against=base.label, of=label)
    moved = int(experts_moved(new, base.journey.placement).sum())
    moves = Moves(moved, new.num_slots * new.num_layers, None if expert_bytes is None else moved * expert_bytes)
    return Compared(plan.path, plan.plan, label, today, against_first, moves)
