"""Effects of decisions on tokens: where experts live, where samples sit, into which chunks layers are cut.

This is the only place that knows it: a new kind of decision adds a row to `EFFECTS`.

Legend: I samples; L MoE layers; D devices.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ...runtime.decisions import DispatchModel, SidecarFile
from ...runtime.migrating.predictor import Predictor
from ...runtime.plan import Plan
from ...runtime.wire import Wire
from ...solvers import contiguous
from ...solvers.arrays import Ints
from ...solvers.placement import BY_STEP, Placement, slots_for
from ...solvers.rehoming import fault
from ...solvers.replicas import ReplayRule
from ...traces.model import ModelSpec
from ..options import EvaluationOptions, PipelineOptions
from .chunks import Cuts
from .homes import HomeRule, Rehoming
from .rebalancing import Following
from .scene import BACKWARD, Passes

TODAY = "contiguous/standard"  # the label of what runs without a plan
EXACTLY = "plan, exact rows"  # the plan where hidden vectors travel as they are, beside one where they do not
BY_PLACE = ("nearest", "static", "round_robin")  # replica rules that go by the device of the token
EVENLY = "plan, even"  # the plan where replicas share alike, beside one for steps that are split exactly
WITHOUT_WATERFILL = "without waterfill"  # of a plan: shared experts at home, beside one with them where there is room
ReadSidecar = Callable[[SidecarFile], bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Journey:
    """Path of tokens and samples under some decisions."""

    dispatch_model: DispatchModel
    placement: Placement
    #: Which replica a token uses, as an engine has it; None: as the placement has it
    replica_rule: ReplayRule | None = None
    homes: HomeRule | None = None  #: Where samples are re-homed; None: tokens go as the dispatch model says
    #: Where every sample is when each layer begins and after the last, `[L+1, I]`: what `homes` gave on a trace
    moves: Ints | None = None
    least: bool = False  #: Whether port loads are lower bounds over all homes of samples
    following: Following | None = None  #: How the placement changes between steps; None: it stays
    cuts: Cuts | None = None  #: The chunks of every layer; None: layers are whole
    #: Every expert's buffer over its mean rows, all of it sent and computed; None: what is routed is sent
    capacity_factor: float | None = None
    wire: Wire | None = None  #: The form in which hidden vectors travel; None: as they are
    #: Whether shared experts are computed at home where the scene's engine would send some elsewhere
    shared_at_home: bool = False

    @property
    def rule(self) -> str:
        """The rule by which tokens choose replicas."""
        if self.following is not None:
            return self.following.split
        return self.replica_rule or self.placement.replica_rule.value

    def sends_as(self, other: "Journey") -> bool:
        """Check whether tokens and samples go the same way as on another journey; chunks and capacities change none."""
        names = ("dispatch_model", "replica_rule", "least", "shared_at_home")
        alike = all(getattr(self, name) == getattr(other, name) for name in names)
        moved = self.moves is other.moves
        if self.moves is not None and other.moves is not None:
            moved = np.array_equal(self.moves, other.moves)
        return alike and moved and self.following is other.following and self.placement.sends_as(other.placement)

    def goes_as(self, other: "Journey") -> bool:
        """Check whether tokens and samples do the same as on another journey."""
        alike = (self.homes, self.cuts, self.capacity_factor) == (other.homes, other.cuts, other.capacity_factor)
        return alike and self.wire == other.wire and self.sends_as(other)


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """A journey by the name it has in a report."""

    name: str
    journey: Journey

    @property
    def label(self) -> str:
        """Name and dispatch model, as verdicts and files call it."""
        return f"{self.name}/{self.journey.dispatch_model}"

    def named(self, name: str, **changes: Any) -> "Contender":
        """A copy under another name, with these fields of its journey replaced."""
        return Contender(name, replace(self.journey, **changes))

    def served(self, rule: ReplayRule | None) -> "Contender":
        """Contender whose tokens choose replicas by a rule; itself where they have one, or steps are split."""
        own = self.journey.placement
        kept = self.journey.replica_rule or own.replica_rule in (rule, *BY_STEP) or not own.has_replicas
        return self if rule is None or kept else self.named(self.name, replica_rule=rule)

    def wired(self, wire: Wire | None) -> "Contender":
        """Contender with hidden vectors in another form; itself where they travel as they are."""
        return self if wire is None else self.named(f"{self.name}, {wire}", wire=wire)


def distinct(rows: Iterable[Contender]) -> list[Contender]:
    """The contenders, of several with the same label the first."""
    by_label = dict[str, Contender]()
    for one in rows:
        by_label.setdefault(one.label, one)
    return [*by_label.values()]


Effect = Callable[[Journey, Plan, ReadSidecar], Journey]


def journey_of(plan: Plan, read: ReadSidecar) -> Journey:
    """The journey under a plan's decisions; `read` gives the bytes of a file that a decision names.

    `InputError` or `UsageError` where they cannot be carried out, or a file is missing, damaged or another one.
    """
    usual, wire = today(plan.model, plan.cluster).journey, plan.decisions.wire
    journey = replace(usual, dispatch_model=plan.dispatch_model, wire=wire)
    for key in plan.decisions.names:
        journey = EFFECTS[key](journey, plan, read)
    return journey


def passes_of(plan: Plan) -> Passes | None:
    """The passes of a step under a plan that cuts layers into chunks, or is for training; None under others."""
    if plan.decisions.pipeline is not None:
        options = PipelineOptions.of(plan)
        return Passes(options.backward, options.full_duplex)
    return Passes(BACKWARD, full_duplex=False) if EvaluationOptions.use_in(plan) == "training" else None


def pads_in(plan: Plan) -> bool:
    """Check whether attention pads the samples of a device under a plan."""
    policy = plan.decisions.sample_policy
    return policy is not None and policy.attention is not None and policy.attention.batches == "padded"


def today(model: ModelSpec, cluster: Cluster, slots: Ints | None = None) -> Contender:
    """Baseline without a plan: contiguous experts, one slot each, standard dispatch, whole layers, no re-homing.

    Devices without any of a plan's `slots` `[D]` hold nothing today either.
    """
    alive_D = np.ones(cluster.num_devices, np.bool_) if slots is None else slots > 0
    slots_D = np.zeros(cluster.num_devices, np.int64)
    slots_D[alive_D] = slots_for(model.num_experts, int(alive_D.sum()))
    dead = ", ".join(map(str, np.flatnonzero(~alive_D)))
    return Contender(
        f"contiguous without {dead}" if dead else "contiguous", Journey("standard", _in_order(model, cluster, slots_D))
    )


def is_today(label: str) -> bool:
    """Check whether a contender's label is that of `today`, whatever devices are dead."""
    return re.fullmatch(r"contiguous( without \d+(, \d+)*)?/standard", label) is not None


def contiguous_in(slots: Ints, model: ModelSpec, cluster: Cluster, rule: str = "even") -> Contender:
    """Contiguous experts in the plan's number of slots; today's baseline where that is the same.

    Each token chooses its replicas by the plan's rule; they share alike where that splits steps.
    """
    usual = today(model, cluster, slots)
    if np.array_equal(usual.journey.placement.slots, slots):
        return usual
    equal = len(set(slots.tolist())) == 1
    name = f"{usual.name} in {slots.sum() if equal else ' '.join(map(str, slots))} slots"
    in_slots = usual.named(name, placement=_in_order(model, cluster, slots))
    return in_slots.named(name, replica_rule=rule) if rule in BY_PLACE else in_slots


def _in_order(model: ModelSpec, cluster: Cluster, slots_D: Ints) -> Placement:
    return contiguous.solve(model.num_layers, model.num_experts, cluster, slots=slots_D).placement


def _placed(journey: Journey, plan: Plan, read: ReadSidecar) -> Journey:
    assert plan.placement is not None
    return replace(journey, placement=plan.placement)


def _piped(journey: Journey, plan: Plan, read: ReadSidecar) -> Journey:
    pipeline = plan.decisions.pipeline
    assert pipeline is not None
    return replace(journey, cuts=Cuts.of(pipeline), capacity_factor=pipeline.capacity_factor)


def _moved(journey: Journey, plan: Plan, read: ReadSidecar) -> Journey:
    policy, model = plan.decisions.sample_policy, plan.model
    assert policy is not None
    if wrong := fault(policy.method, policy.attention, predicts=policy.predictor is not None):
        raise UsageError(wrong)
    if policy.layers != tuple(range(model.num_layers)):
        raise UsageError(f"a policy in {len(policy.layers)} of {model.num_layers} layers; expected one in all of them")
    predictor = None
    if policy.predictor is not None:
        shape = (model.num_layers - 1, model.num_experts, plan.cluster.num_devices)
        predictor = Predictor.from_bytes(read(policy.predictor), shape)
    return replace(journey, homes=Rehoming(policy.method, predictor, law=policy.attention))


def _followed(journey: Journey, plan: Plan, read: ReadSidecar) -> Journey:
    decision = plan.decisions.rebalancing
    assert decision is not None
    assert plan.placement is not None
    return replace(journey, placement=plan.placement, following=Following.of(decision))


def _condensed(journey: Journey, plan: Plan, read: ReadSidecar) -> Journey:
    raise UsageError(
        "a plan with condensation gives other results than today's, by which gains are no benefit; moeplan show says"
        " what it saves and costs: compare the plan without it"
    )


EFFECTS: dict[str, Effect] = {
    "placement": _placed,
    "pipeline": _piped,
    "sample_policy": _moved,
    "rebalancing": _followed,
    "condensation": _condensed,
}
