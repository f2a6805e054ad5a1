"""A plan from a file in a comparison: its baselines, and the samples it was fitted to."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from ..errors import InputError, MismatchError, UsageError
from ..files import sha256_file
from ..profilers.cluster import Cluster
from ..runtime.plan import Plan, load
from ..solvers.arrays import Bools
from ..solvers.replicas import ReplayRule
from ..traces.count_form import CountTrace
from ..traces.importers.hidden_layers import spans
from ..traces.model import ModelSpec
from ..traces.reader import Trace
from ..traces.split import earliest
from .evaluate.journey import WITHOUT_WATERFILL, Contender, contiguous_in, journey_of, passes_of, today
from .evaluate.metrics import load_metric
from .evaluate.scene import Passes, Scene
from .evaluate.units import SampleIndex, UnitIndex
from .options import EvaluationOptions
from .strategies.placement_options import PlacementOptions
from .strategies.registry import decided_by
from .strategies.strategy import Strategy

SAME = ("name", "layer_ids", "num_experts", "top_k")  # what two traces of one model agree on


@dataclass(frozen=True)
class LoadedPlan:
    """A plan from a file, with its place in a comparison."""

    path: str
    plan: Plan
    replica_rule: ReplayRule | None = None  #: Which replica a token uses; None: as the plan was judged
    by_counts: bool = False  #: Whether it is judged on counts, which tell no token's device as engines' rules need
    fills: bool = False  #: Whether it is judged with shared experts as load, where SGLang's waterfill puts them

    @property
    def moves_samples(self) -> bool:
        """Check whether it re-homes samples."""
        return self.plan.decisions.sample_policy is not None

    @property
    def strategy(self) -> Strategy:
        """Strategy of the plan's last decision. A plan by none of our strategies is judged as a placement."""
        decided = decided_by(self.plan)
        return decided[-1] if decided and decided[-1].name == self.plan.strategies[-1] else Strategy()

    @cached_property
    def contender(self) -> Contender:
        """The plan under its path; errors as of `journey_of`."""
        try:
            journey = journey_of(self.plan, lambda file: file.read(Path(self.path).parent))
        except (UsageError, InputError) as error:
            raise type(error)(f"{self.path}: {error}") from error
        if self.replica_rule is not None:
            return Contender(self.path, replace(journey, replica_rule=self.replica_rule))
        return Contender(self.path, journey).served(None if self.by_counts else self.plan.judged_by)

    @cached_property
    def beside(self) -> list[Contender]:
        """Baselines, today's first; each of the others leaves out one part of the plan: its placement, its chunks, its
        re-homing, its form of hidden vectors.
        """
        contender, model, cluster = self.contender, self.plan.model, self.plan.cluster
        slots_D = contender.journey.placement.slots
        usual = today(model, cluster, slots_D)
        own_rule = contender.journey.rule if self.replica_rule is None else "even"  # else it is the same in all rows
        in_slots = contiguous_in(slots_D, model, cluster, own_rule).served(self.replica_rule)
        rows = [in_slots.wired(contender.journey.wire)]
        if contender.journey.wire is not None:
            rows.append(contender.named(f"{self.path}, exact rows", wire=None))
        if contender.journey.dispatch_model == "coherent":
            rows.append(in_slots.named(in_slots.name, dispatch_model="coherent"))
        if contender.journey.cuts is not None:
            rows.append(contender.named(f"{self.path} at degree 1", cuts=None))
        if self.moves_samples:
            rows.append(contender.named(f"{self.path}, samples staying", dispatch_model="standard", homes=None))
        if contender.journey.following is not None:
            rows.append(contender.named(f"{self.path}, replicas staying", following=None))
        if self.fills:
            rows.append(contender.named(f"{self.path}, {WITHOUT_WATERFILL}", shared_at_home=True))
        return [usual, *(one for one in rows if not one.journey.goes_as(usual.journey))]

    def check_model(self, trace: Trace | CountTrace) -> None:
        """Refuse a trace of another model than the plan's."""
        check_model(self.path, self.plan.model, trace, names=SAME, expected="a trace of the plan's model")
        if isinstance(trace, Trace) and self.plan.dispatch_model == "coherent":
            trace.check_first_choices(f"{self.path}, a coherent plan,")

    def judged_on(self, scene: Scene) -> str:
        """The metric of its verdict; counts without samples hold loads alone."""
        by_loads = isinstance(scene.source, CountTrace) and scene.samples is None
        if by_loads:
            return load_metric(scene.costs)
        return self.strategy.judged_on(scene, self.contender.journey.dispatch_model)

    def unseen(self, index: UnitIndex | SampleIndex, sha256: str, phases: Sequence[str]) -> Bools:
        """Mask of the units of a trace that were not fitted, `[U]`: all of another trace's.

        Blocks of rows are numbered among the phases read; where the plan read others, all count as fitted.
        """
        source, size = self.plan.inputs.trace, len(index.unit_tokens)
        members = PlacementOptions.of(self.plan).mixture if "placement" in self.plan.options else ()
        if source is None or sha256 not in {source.sha256, *(member.sha256 for member in members)}:
            return np.ones(size, np.bool_)
        split = source.split
        if self.strategy.by_time and index.kind == "step":
            return ~earliest(np.ones(size, np.bool_), split.fit_fraction)
        if index.kind == "step" and EvaluationOptions.of(self.plan).unit != "step":
            return np.zeros(size, np.bool_)  # any step may hold samples that it was fitted to
        if "evaluation" not in self.plan.options:
            return ~index.fitted(seed=split.seed, fraction=split.fit_fraction)
        options = EvaluationOptions.of(self.plan)
        if options.unit == "block" and options.phases != tuple(phases):
            return np.zeros(size, np.bool_)
        if isinstance(index, UnitIndex):
            return ~index.fitted(seed=split.seed, fraction=split.fit_fraction)
        if options.unit == "step" and index.step is None:
            raise InputError(f"{self.path}: split by step, which its trace does not record; the plan was edited")
        return ~index.fitted(seed=split.seed, fraction=split.fit_fraction, unit=options.unit)


def load_plans(paths: Sequence[str | os.PathLike[str]], rule: ReplayRule | None = None) -> list[LoadedPlan]:
    """The plans in these files, one or more, each once, else UsageError; their replicas chosen by a rule if given."""
    names = [str(path) for path in paths]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"plans {', '.join(names)[:200] or 'none'}; expected one or more, each once")
    return [LoadedPlan(name, load(name), rule) for name in names]


def common_cluster(plans: Sequence[LoadedPlan], described: Cluster | None, *, timed: bool) -> Cluster:
    """The one cluster that all plans are for, with the first one's links, or those that a profile describes."""
    for one in plans:
        if str(one.plan.cluster) != str(plans[0].plan.cluster):
            raise UsageError(
                f"{one.path} is for {one.plan.cluster}, {plans[0].path} for {plans[0].plan.cluster};"
                " expected plans for one cluster: compare them one at a time"
            )
        if one.plan.decisions.pipeline is not None and not timed:
            raise UsageError(f"{one.path}: its pipeline degrees change seconds only; name a profile with --profile")
    cluster = plans[0].plan.cluster
    if described is None:
        return cluster
    known = described.links_on(cluster)
    links = {kind: link for kind, link in known.items() if kind != "inter" or cluster.num_nodes > 1}
    return replace(cluster, links={**cluster.links, **links})


def made_with(plan: Plan, profile: str | os.PathLike[str]) -> bool:
    """Check whether a plan was made with this very profile."""
    return plan.inputs.profile is not None and plan.inputs.profile.sha256 == sha256_file(profile)


def common_passes(plans: Sequence[LoadedPlan]) -> Passes | None:
    """The passes of a step that all plans were made for; None where none trains or cuts layers."""
    passes = {one.path: of for one in plans if (of := passes_of(one.plan)) is not None}
    used = (one for one in plans if one.path not in passes and EvaluationOptions.use_in(one.plan))
    serving = {one.path: Passes(0.0, full_duplex=False) for one in used}
    if len({of.backward for of in (*passes.values(), *serving.values())}) > 1:
        passes |= serving
    if len(set(passes.values())) > 1:
        listed = ", ".join(f"backward {of.backward:g}, full duplex {of.full_duplex}" for of in passes.values())
        raise UsageError(
            f"{', '.join(passes)} differ in their passes or duplex: {listed}; one cost model compares plans, so solve"
            " them alike"
        )
    return next(iter(passes.values()), None)


def check_model(
    path: object,
    planned: ModelSpec,
    trace: Trace | CountTrace,
    *,
    names: Sequence[str] = (),
    unknown: bool = False,
    expected: str = "the same model: give the plan's own trace, or solve on this one",
) -> None:
    """Refuse a trace whose model differs from a plan's in these fields, or any; `unknown` ones may where asked for."""
    ours, theirs = ({**asdict(one), **asdict(one.attention), "attention": None} for one in (planned, trace.meta.model))
    sizes = [(name, ours[name], theirs[name]) for name in names or ours if ours[name] != theirs[name]]
    if differing := [row for row in sizes if not (unknown and None in row)]:
        own, recorded = (
            ", ".join(f"{row[0]} {'unknown' if row[at] is None else _sized(row[at])}" for row in differing)
            for at in (1, 2)
        )
        raise MismatchError(f"{path}: a plan for {own}, {trace.path} has {recorded}; expected {expected}")


def _sized(value: Any) -> str:
    """A size of a model in few signs; of ids of layers their spans and their number."""
    text = f"{spans(value)} ({len(value)} layers)" if isinstance(value, tuple) else str(value)
    return shorten(text, 60, placeholder=" ...")


def known_model(model: ModelSpec, plans: Sequence[Plan]) -> ModelSpec:
    """The trace's model, sizes that it lacks as the first plan that knows them has them."""
    for plan in plans:
        lacking = [one.name for one in dataclasses.fields(ModelSpec) if getattr(model, one.name) is None]
        attention = model.attention if model.attention.kv_size else plan.model.attention
        model = replace(model, attention=attention, **{name: getattr(plan.model, name) for name in lacking})
    return model
