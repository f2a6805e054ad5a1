"""An entry of a comparison: a plan, the placement it runs under, and what it is held against."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...errors import MismatchError, UsageError
from ...profilers.cluster import Cluster
from ...profilers.profile import load as load_profile
from ...runtime.decisions import SamplePolicyDecision
from ...runtime.plan import Plan, Split, load
from ...solvers import contiguous
from ...solvers.placement import Placement, slots_for
from ...traces.count_form import CountTrace
from ...traces.model import ModelSpec
from ...traces.reader import Trace
from ..measures.tally import Route
from ..options import PlacementOptions, parsed

__all__ = ["Entry", "check_model", "common_cluster", "entries_of", "known_model"]

SAME = ("name", "layer_ids", "num_experts", "top_k")  # what two traces of one model agree on


@dataclass(frozen=True, slots=True)
class Entry:
    """A plan with its place in the comparison: its own placement, else contiguous."""

    path: str
    plan: Plan
    placement: Placement

    @property
    def policy(self) -> SamplePolicyDecision | None:
        """How it moves samples; None where they stay."""
        return self.plan.decisions.sample_policy

    @property
    def route(self) -> Route:
        """Its placement under its dispatch model."""
        return Route(self.path, self.plan.dispatch_model, self.placement)

    @property
    def baselines(self) -> tuple[Route, ...]:
        """What it must beat, each: contiguous in as many slots, and where tokens stay with their experts, the same with
        tokens that stay too, since coherence alone saves copies; for a pipeline the same placement, in one chunk, and
        for a sample policy the same placement, samples where they start.
        """
        if self.plan.judges_pipeline:
            return (Route(f"{self.path} at degree 1", "standard", self.placement),)
        if self.policy and self.plan.placement is not None:
            return (Route(f"{self.path}, samples staying", "standard", self.placement),)
        slots_D = self.placement.slots
        name = f"contiguous in {self.placement.num_slots} slots"
        if len(set(slots_D.tolist())) > 1:
            name = f"contiguous in the slots of {self.path}"
        elif slots_D[0] == -(-self.placement.num_experts // len(slots_D)):
            name = "contiguous"
        in_order = Route(name, "standard", _contiguous(self.plan, slots_D))
        both = self.plan.dispatch_model == "coherent"
        return (in_order, replace(in_order, dispatch_model="coherent")) if both else (in_order,)

    def split_of(self, sha256: str) -> Split | None:
        """How the units of a trace were split for it; None where it was made from another trace."""
        source = self.plan.inputs.trace
        if source is None:
            return None
        fitted_to = {source.sha256}
        if "placement" in self.plan.options:
            options = parsed(PlacementOptions, self.plan.options["placement"], "placement")
            fitted_to |= {one.sha256 for one in options.mixture}
        return source.split if sha256 in fitted_to else None


def entries_of(paths: Sequence[str | os.PathLike[str]]) -> list[Entry]:
    """The plans in these files.

    Raises
    ------
    UsageError
        None, or one twice.
    """
    names = [str(path) for path in paths]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"plans {', '.join(names)[:200] or 'none'}; expected one or more, each once")
    found = []
    for name in names:
        plan = load(name)
        slots_D = slots_for(plan.model.num_experts, plan.cluster.num_devices)
        found.append(Entry(name, plan, plan.placement or _contiguous(plan, slots_D)))
    return found


def common_cluster(entries: Sequence[Entry], profile: str | os.PathLike[str] | None) -> Cluster:
    """The one cluster that all plans are for, with the first one's links, or the profile's where it has some."""
    piped = [entry.path for entry in entries if entry.plan.judges_pipeline]
    for entry in entries:
        if piped and entry.plan.dispatch_model != "standard":
            raise UsageError(
                f"{entry.path} is for {entry.plan.dispatch_model} dispatch, {piped[0]} cuts layers of standard into"
                " chunks; expected one kind of layer: compare them apart"
            )
        if str(entry.plan.cluster) != str(entries[0].plan.cluster):
            raise UsageError(
                f"{entry.path} is for {entry.plan.cluster}, {entries[0].path} for {entries[0].plan.cluster};"
                " expected plans for one cluster: compare them one at a time"
            )
        if entry.path in piped and profile is None:
            raise UsageError(f"{entry.path}: its pipeline degrees change seconds only; name a profile with --profile")
    cluster = entries[0].plan.cluster
    known = {} if profile is None else load_profile(profile).cluster.links
    links = {kind: link for kind, link in known.items() if kind != "inter" or cluster.num_nodes > 1}
    return replace(cluster, links={**cluster.links, **links})


def check_model(entry: Entry, trace: Trace | CountTrace) -> None:
    """Refuse a trace of another model than the plan's."""
    for name in SAME:
        ours, theirs = getattr(entry.plan.model, name), getattr(trace.meta.model, name)
        if ours != theirs:
            raise MismatchError(
                f"{entry.path}: a plan for {name} {ours!s:.60}, {trace.path} has {theirs!s:.60}; expected a trace of"
                " the plan's model"
            )
    if isinstance(trace, Trace) and entry.plan.dispatch_model == "coherent":
        trace.check_first_choices(f"{entry.path}, a coherent plan,")


def known_model(model: ModelSpec, plans: Sequence[Plan]) -> ModelSpec:
    """The trace's model, sizes that it lacks as the first plan that knows them has them."""
    for plan in plans:
        lacking = [one.name for one in dataclasses.fields(ModelSpec) if getattr(model, one.name) is None]
        attention = model.attention if model.attention.kv_size else plan.model.attention
        model = replace(model, attention=attention, **{name: getattr(plan.model, name) for name in lacking})
    return model


def _contiguous(plan: Plan, slots_D: NDArray[np.int64]) -> Placement:
    return contiguous.solve(plan.model.num_layers, plan.model.num_experts, plan.cluster, slots=slots_D).placement
