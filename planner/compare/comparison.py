"""How plans fare on any trace of their model: side by side, each against its own baseline and against the first.

Units that a plan was fitted to are left out where the trace is the plan's own.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...profilers.cluster import Cluster
from ...profilers.profile import load as load_profile
from ...runtime.plan import Metric, Part, Plan, Verdict
from ...solvers.replicas import ReplayRule
from ...traces.count_form import CountTrace, open_any
from ..evaluate import Evaluated, judge, verdict
from ..expert_moves import Moves
from ..measures.metrics import copies_metric
from ..measures.speeds import Speeds
from ..netmoe.strategy import PAYS_FROM, judged_metric
from ..options import SecondsOptions
from ..request import SAMPLES_PER_DEVICE, Phase
from ..strategy import STRATEGIES
from ..tables.part import value
from .entry import Entry, check_model, common_cluster, entries_of, known_model
from .judges import Judges
from .rows import contenders
from .setting import Setting, check_setting

__all__ = ["Compared", "Comparison", "compare"]


@dataclass(frozen=True, slots=True)
class Compared:
    """One plan on the trace.

    Parameters
    ----------
    label
        Its contender's label.
    verdict
        Whether it still pays: against that of its own baselines which it beats by least.
    against_first
        How it stands to the first plan, which has none.
    moves
        What it takes to replace the first plan by it; None for that one.
    baselines
        The labels of its own baselines.
    """

    path: str
    plan: Plan
    label: str
    verdict: Verdict
    against_first: Verdict | None
    moves: Moves | None = None
    baselines: tuple[str, ...] = ()

    @property
    def claimed(self) -> Metric | None:
        """The gain that it was solved with; None where that was of another metric."""
        solved = self.plan.verdict
        return solved.gain if solved is not None and solved.metric == self.verdict.metric else None

    @property
    def gain_over_same(self) -> float | None:
        """What it gained then over what it is held against now; None where that was not judged beside it."""
        if (evaluation := self.plan.evaluation) is None:
            return None
        against, metric = self.verdict.against, self.verdict.metric
        ours, *others = evaluation.judging.contenders
        held = [value(other, metric) for other in others if other.label == against and metric in other.metrics]
        return held[0] - value(ours, metric) if held else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plans on a trace.

    Parameters
    ----------
    part
        The contenders: the plans, then their baselines.
    unit, num_fitted
        What judges, and how many of them were left out because a plan was fitted to them.
    seen
        Whether nothing else was left, so that plans are judged on what they were fitted to.
    seconds
        How seconds were predicted; None without.
    replica_rule
        Which replica a token uses, as an engine has it; None: as each plan has it.
    between
        Contender to the copies a step from every device to every other one, `[D, D]`, where that was asked for.
    """

    trace: str
    trace_sha256: str
    cluster: Cluster
    samples_per_step: int
    part: Part
    compared: tuple[Compared, ...]
    unit: str
    num_fitted: int
    seen: bool
    seconds: SecondsOptions | None
    copy_bytes: int | None = None
    replica_rule: ReplayRule | None = None
    between: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def resampled(self) -> str:
        """What the intervals of shares and copies are over; those of seconds and balance are over steps."""
        return "step" if any(one.plan.decisions.sample_policy for one in self.compared) else self.unit

    @property
    def failing(self) -> list[str]:
        """The plans that do not pay here, by their paths."""
        return [one.path for one in self.compared if one.verdict.value == "none"]

    @property
    def advice(self) -> str:
        """What to do about plans that do not pay."""
        if all(one.verdict.gain.low is None for one in self.compared if one.path in self.failing):
            return "one step shows nothing: give --samples-per-step below the samples of the trace, or record more"
        placed = [one.path for one in self.compared if one.path in self.failing and one.plan.strategies == ("exflow",)]
        return (
            f"re-plan: moeplan solve --from {placed[0]} --trace {self.trace} -o next.json"
            if placed
            else "solve anew on this trace"
        )


def compare(
    plans: Sequence[str | os.PathLike[str]],
    trace: str | os.PathLike[str],
    *,
    profile: str | os.PathLike[str] | None = None,
    phases: Sequence[Phase] = (),
    samples_per_step: int | None = None,
    replica_rule: ReplayRule | None = None,
    between: bool = False,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Evaluate plans side by side on a trace, theirs or another.

    Parameters
    ----------
    trace
        Of tokens; of counts, too, where every plan moves samples, or every one places experts and is judged by loads.
    profile
        What times the parts of a step; None: links alone, where the first plan's cluster has them.
    phases
        Only tokens of these phases count; empty: all.
    samples_per_step
        Of a derived step; None: as the first plan was judged.
    replica_rule
        Which replica a token uses, as an engine has it; None: as each plan has it.
    between
        Tell the copies of every pair of devices, too.
    seed
        Of the intervals.

    Raises
    ------
    UsageError
        A plan that cannot be compared, or not beside the others; no plan.
    MismatchError
        The trace is of another model than a plan.
    """
    entries = entries_of(plans)
    cluster, samples = common_cluster(entries, profile), samples_per_step or _samples_per_step(entries[0].plan)
    on_progress("reading the trace")
    setting = _setting(entries, trace, profile, cluster, phases, samples)
    setting = replace(setting, replica_rule=replica_rule, between=between)
    check_setting(setting, entries)
    on_progress("replaying the trace under the plans and their baselines")
    row, judges = contenders(entries, setting), setting.judges
    evaluated = judge([judges.cohort], [row], setting.model, setting.speeds, seed=seed)
    return Comparison(
        trace=str(trace),
        trace_sha256=setting.source.sha256,
        cluster=cluster,
        samples_per_step=samples,
        part=evaluated.evaluation.fit,
        compared=tuple(_compared(entry, entries[0], evaluated, setting) for entry in entries),
        unit=judges.kind,
        num_fitted=judges.num_fitted,
        seen=judges.seen,
        seconds=evaluated.seconds,
        copy_bytes=setting.model.copy_bytes,
        replica_rule=replica_rule,
        between={
            one.label: one.tally.between / len(one.tally.loads)
            for one in row
            if between and one.tally.between is not None
        },
    )


def _setting(
    entries: Sequence[Entry],
    trace: str | os.PathLike[str],
    profile: str | os.PathLike[str] | None,
    cluster: Cluster,
    phases: Sequence[Phase],
    samples_per_step: int,
) -> Setting:
    """The trace, checked and surveyed, with what times it."""
    source = open_any(trace)
    for entry in entries:
        check_model(entry, source)
    model = known_model(source.meta.model, [entry.plan for entry in entries])
    judges = Judges.of(source, entries, cluster, phases=phases, samples_per_step=samples_per_step)
    timed_by = None if profile is None else load_profile(profile)
    speeds = Speeds.of(timed_by, cluster, model, samples=judges.kind == "sample")
    if speeds is not None and isinstance(source, CountTrace) and not any(entry.policy for entry in entries):
        speeds = speeds.of_loads()
    return Setting(source, judges, cluster, model, speeds, phases, samples_per_step)


def _samples_per_step(plan: Plan) -> int:
    found = plan.options.get("evaluation", {}).get("samples_per_step")
    if found is None:
        return SAMPLES_PER_DEVICE * plan.cluster.num_devices
    if type(found) is not int or not 1 <= found < 2**31:
        raise InputError(f"options.evaluation: samples_per_step {found!r:.20}; expected at least 1 and below 2^31")
    return found


def _compared(entry: Entry, first: Entry, evaluated: Evaluated, setting: Setting) -> Compared:
    label, other = entry.route.label, None
    if entry is not first:
        metric = _metric(first, setting)
        copies = "device_copies" if metric == "step_s" else metric
        other = verdict(evaluated, copies, first.route.label, of=label)
    least = replace(evaluated, at_least=PAYS_FROM if entry.policy else 0.0)
    metric = _metric(entry, setting)
    against = [verdict(least, metric, one.label, of=label) for one in entry.baselines]
    hardest = min(against, key=lambda one: (one.value == "benefit", one.gain.value))
    moves = None if entry is first else Moves.between(first.placement, entry.placement, setting.model)
    baselines = tuple(one.label for one in entry.baselines)
    return Compared(entry.path, entry.plan, label, hardest, other, moves, baselines)


def _metric(entry: Entry, setting: Setting) -> str:
    """What a plan's verdict is about where steps cannot be compared; copies where no strategy of ours made it."""
    if entry.policy:
        return judged_metric(setting.speeds, setting.cluster, setting.model)
    if setting.by_loads:
        return "balance"
    made_by = STRATEGIES.get(entry.plan.strategies[-1]) if entry.plan.strategies else None
    dispatch_model, cluster = entry.plan.dispatch_model, entry.plan.cluster
    return made_by.judged_on(dispatch_model, cluster) if made_by else copies_metric(dispatch_model, cluster)
