"""Decisions that a plan may hold: which expert is where and when that changes, how layers are cut, where samples go.

A new kind of decision is a subclass of `Decision` and a row of `DECISIONS`: plans check it, hash it and take its files
along without naming it.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import to_json

from ..errors import InputError
from ..files import size_of, validated
from ..profilers.cluster import Cluster
from ..solvers import ports
from ..solvers.luffy.attention import Law
from ..solvers.placement import Placement, ReplicaRule
from ..traces.model import NOT_ROUTED, ModelSpec
from .wire import Wire

SHARE_DIGITS = 9  # of a layer; boundaries of chunks are rounded to these
LEAST_SHARE = 1e-8  # so that no chunk is empty then

MAX_DEGREE = 65_536
MAX_CAPACITY_FACTOR = 1024
MAX_SIDECAR_BYTES = 2**30
MOST_STEPS, MOST_RECORDS, MOST_EVALUATIONS = 10**9, 4096, 100_000  # of rebalancing
DispatchModel = ports.DispatchModel
DISPATCH_MODELS: tuple[DispatchModel, ...] = get_args(DispatchModel)
TRAINED: frozenset[DispatchModel] = frozenset({"standard", "migrating"})  # under which gradients flow
WIRED: DispatchModel = "standard"  # under which hidden vectors travel in another form
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ExpertId = Annotated[int, Field(ge=0, lt=NOT_ROUTED)]
NumSlots = Annotated[int, Field(ge=0, le=NOT_ROUTED)]
Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE)]
Layer = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=LEAST_SHARE, le=1)]


class Record(BaseModel):
    """A part of the plan: frozen, strict about keys, finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


class SidecarFile(Record):
    """A file beside the plan, known by its hash; `file` is a plain name."""

    file: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")
    sha256: Sha256

    @classmethod
    def of(cls, kind: str, contents: bytes) -> Self:
        """Name a file by its kind and its contents."""
        sha256 = hashlib.sha256(contents).hexdigest()
        return cls(file=f"{kind}-{sha256[:16]}.safetensors", sha256=sha256)

    def read(self, folder: Path) -> bytes:
        """Read the file in the folder of its plan.

        Raises
        ------
        InputError
            It is not there, too large, or another file than the plan names.
        """
        path = folder / self.file
        advice = "the plan needs it beside it: copy it there, or run moeplan solve again"
        if not path.exists():
            raise InputError(f"{path}: is not there; {advice}")
        if (size := size_of(path, what="a file of the plan")) > MAX_SIDECAR_BYTES:
            raise InputError(f"{path}: {size:,} bytes, expected at most {MAX_SIDECAR_BYTES:,}; {advice}")
        contents = path.read_bytes()
        if (sha256 := hashlib.sha256(contents).hexdigest()) != self.sha256:
            raise InputError(f"{path}: has hash {sha256[:12]}.., not {self.sha256[:12]}..; {advice}")
        return contents


class Decision(Record):
    """A decision of a plan, which holds at most one of each kind."""

    key: ClassVar[str]  #: The name of the kind in a plan
    #: Those under which the decision can be carried out; a plan that names none gets the first that suits all
    dispatch_models: ClassVar[tuple[DispatchModel, ...]] = DISPATCH_MODELS

    def check(self, model: ModelSpec, cluster: Cluster, /) -> None:
        """Refuse a decision that does not fit the plan's model or cluster.

        Raises
        ------
        InputError
            What does not fit.
        """


class PlacementDecision(Decision):
    """The expert in each slot (`solvers.placement` holds the rules)."""

    key = "placement"

    slots_per_device: NumSlots | tuple[NumSlots, ...]
    physical_to_logical: tuple[tuple[ExpertId, ...], ...]
    replica_rule: ReplicaRule
    repaired: int = Field(0, ge=0)

    @classmethod
    def of(cls, placement: Placement, *, repaired: int = 0) -> Self:
        """The decision that carries a placement out."""
        slots = placement.slots.tolist()
        return cls(
            slots_per_device=slots[0] if len(set(slots)) == 1 else tuple(slots),
            physical_to_logical=tuple(map(tuple, placement.physical_to_logical.tolist())),
            replica_rule=placement.replica_rule,
            repaired=repaired,
        )

    def placement(self, model: ModelSpec, cluster: Cluster) -> Placement:
        """The placement as arrays.

        Raises
        ------
        InputError
            It is for another number of layers or devices, or breaks a rule of placements.
        """
        lengths = {len(row) for row in self.physical_to_logical}
        if len(lengths) != 1 or len(self.physical_to_logical) != model.num_layers:
            raise InputError(
                f"placement of {len(self.physical_to_logical)} layers with {sorted(lengths)} slots;"
                f" expected {model.num_layers} layers, all with the same number"
            )
        slots = self.slots_per_device
        slots_D = np.full(cluster.num_devices, slots) if isinstance(slots, int) else np.array(slots, np.int64)
        if slots_D.size != cluster.num_devices:
            raise InputError(
                f"placement for {slots_D.size} devices; the plan's cluster {cluster} has {cluster.num_devices}"
            )
        table_LP = np.array(self.physical_to_logical, dtype=np.int32)
        return Placement(table_LP, slots_D, model.num_experts, self.replica_rule)

    def check(self, model: ModelSpec, cluster: Cluster, /) -> None:
        """Refuse a placement that breaks a rule."""
        self.placement(model, cluster)


def boundaries(shares: Sequence[float]) -> list[float]:
    """Boundaries of the chunks of these shares of a layer, from 0 to 1, rounded."""
    inner = itertools.accumulate(shares[:-1], initial=0.0)
    return [*(round(end, SHARE_DIGITS) for end in inner), 1.0]


class ChunkShares(Record):
    """Shares of every MoE layer in its chunks, in the order of dispatch; their numbers are the degrees of a pass."""

    #: forward, backward: a tuple a layer that sums to 1; `backward` is None where no backward pass was planned
    forward: tuple[tuple[Share, ...], ...]
    backward: tuple[tuple[Share, ...], ...] | None


class PipelineDecision(Decision):
    """Into how many chunks each MoE layer is cut, so that its exchanges and its experts overlap."""

    key = "pipeline"
    dispatch_models = ("standard", "migrating")

    #: forward, backward: a degree a layer for each pass; `backward` is None where no backward pass was planned
    forward: tuple[Degree, ...]
    backward: tuple[Degree, ...] | None
    shares: ChunkShares | None = None  #: Of the chunks where they are unequal; None: equal ones
    #: Every expert's buffer over its mean rows, padded to a multiple of both degrees; None: no fixed capacity
    capacity_factor: Annotated[float, Field(gt=0, le=MAX_CAPACITY_FACTOR)] | None = None

    def check(self, model: ModelSpec, _cluster: Cluster, /) -> None:
        """Refuse degrees of another number of layers."""
        for name, degrees in (("forward", self.forward), ("backward", self.backward)):
            if degrees is not None and len(degrees) != model.num_layers:
                raise InputError(
                    f"pipeline of {len(degrees)} {name} degrees; expected {model.num_layers}, one an MoE layer"
                )

    @model_validator(mode="after")
    def _of_whole_layers(self) -> Self:
        """Refuse shares that are not as many as the degrees say, or do not make whole layers."""
        if self.shares is None:
            return self
        passes = {"forward": (self.forward, self.shares.forward), "backward": (self.backward, self.shares.backward)}
        for name, (degrees, shares) in passes.items():
            if degrees != (None if shares is None else tuple(map(len, shares))):
                raise ValueError(f"{name} shares of other chunks than the degrees; expected one a chunk of every layer")
            if wrong := [total for total in map(sum, shares or ()) if not math.isclose(total, 1)]:
                raise ValueError(f"{name} shares of a layer sum to {wrong[0]:.6g}; expected 1")
        return self

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        optional = ("shares", "capacity_factor")  # not written where absent: plans without them keep their hash
        return {name: value for name, value in write(self).items() if value is not None or name not in optional}


class SamplePolicyDecision(Decision):
    """Layers that re-home their samples, the method, and the prediction of the next layer."""

    key = "sample_policy"
    dispatch_models = ("migrating",)

    method: str
    layers: tuple[Layer, ...]  #: Ordinals of the MoE layers whose combine delivers samples to new homes, ascending
    predictor: SidecarFile | None = None  #: None: only this layer's routing decides
    attention: Law | None = None  #: What attention costs, of methods that count it (`solvers.luffy.METHODS`)

    def check(self, model: ModelSpec, _cluster: Cluster, /) -> None:
        """Refuse layers that the model has not, or that do not ascend."""
        if sorted(set(self.layers)) != [*self.layers] or max(self.layers, default=0) >= model.num_layers:
            raise InputError(
                f"sample_policy of layers {self.layers!s:.80}; expected ascending ordinals below {model.num_layers}"
            )

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Plans without attention keep their hash."""
        return {name: value for name, value in write(self).items() if value is not None or name != "attention"}


class RebalancingDecision(Decision):
    """Replicas that follow the load while a model trains: where they start, and the policy by which they change."""

    key = "rebalancing"
    dispatch_models = ("standard",)

    method: Literal["search", "paper"]  #: `solvers.flexmoe.Policy` or `.Paper`
    start: PlacementDecision  #: The placement of the first step; later ones may leave slots empty
    trigger: float = Field(
        ge=1, le=MOST_STEPS
    )  #: Max/mean of the last step under its exact split, above which it plans
    horizon_steps: float = Field(gt=0, le=MOST_STEPS)  #: Steps over which a move must pay
    record_steps: int = Field(1, ge=1, le=MOST_STEPS)  #: It looks at the loads of one step in so many
    #: window, every: the last so many records are planned for together, and after one in so many records it
    #: plans even below the trigger; 0: never
    window: int = Field(ge=1, le=MOST_RECORDS)
    every: int = Field(ge=0, le=MOST_STEPS)
    evaluations: int = Field(ge=0, le=MOST_EVALUATIONS)  #: Of the search by seconds, in each decision; 0: balance alone
    costs: Mapping[str, float]  #: Rates that it decides by: the fields of `solvers.flexmoe.Costs`
    schedule: SidecarFile | None = None  #: What it did on the trace it was judged on

    def check(self, model: ModelSpec, cluster: Cluster, /) -> None:
        """Refuse a start that breaks a rule, and rates of other names or signs."""
        from ..solvers.flexmoe.costs import Costs

        self.start.check(model, cluster)
        if not isinstance(self.start.slots_per_device, int) or self.start.replica_rule is not ReplicaRule.QUOTA:
            raise InputError(
                "rebalancing from unequal slots, or not by quota; expected equal slots per device and quota"
            )
        if {*self.costs} != {*Costs._fields}:
            raise InputError(
                f"rebalancing by costs of {', '.join(sorted(self.costs))!s:.120}; expected {', '.join(Costs._fields)}"
            )
        if below := [name for name, cost in self.costs.items() if cost < 0]:
            raise InputError(f"rebalancing by {below[0]} {self.costs[below[0]]:g}; expected none below 0")


class CondensationDecision(Decision):
    """Rows for another device that need not travel, since one that is near stands for them; results change.

    How near is `tau` or `threshold`, the start of what the schedule moves.
    """

    key = "condensation"
    dispatch_models = ("standard",)

    #: gate: gate weights times distance (times `gains`) are at most `tau`; star: cosines are at least `threshold`
    criterion: Literal["gate", "star"] = "gate"
    tau: float | None = Field(default=None, ge=0)  #: The error that a row may add; None and 0: nothing is condensed
    threshold: float | None = Field(default=None, ge=-1, le=1)
    #: share: what holds the `target`; paper: `2 h_max / (1 + exp(kappa l))` of the relative fall l of the loss
    schedule: Literal["fixed", "share", "paper"] = "fixed"
    target: float | None = Field(default=None, ge=0, lt=1)  #: Share of the rows to save
    h_max: float | None = Field(default=None, ge=-1, le=1)  #: Cosine before the loss falls; Eq. 2 of LUFFY: 0.5
    kappa: float = 1.0
    #: s1, s2: cosines of the layer before from which, and below which, this layer's are not computed (LUFFY)
    s1: float | None = Field(default=None, ge=-1, le=1)
    s2: float | None = Field(default=None, ge=-1, le=1)
    medoid: bool = False  #: Whether the row that stands for others travels as it is; else their mean does
    layers: tuple[Layer, ...] | None = None  #: Ordinals of the MoE layers that condense, ascending; None: all
    #: What errors are taken times, by layer, then expert: its gain over the norm of the residual stream; None: 1
    gains: tuple[tuple[Annotated[float, Field(ge=0)], ...], ...] | None = None

    def check(self, model: ModelSpec, _cluster: Cluster, /) -> None:
        """Refuse layers or gains of another model."""
        if self.layers is not None and (
            sorted(set(self.layers)) != [*self.layers] or max(self.layers, default=0) >= model.num_layers
        ):
            raise InputError(
                f"condensation of layers {self.layers!s:.80}; expected ascending ordinals below {model.num_layers}"
            )
        sizes = (model.num_experts,) * model.num_layers
        if self.gains is not None and tuple(map(len, self.gains)) != sizes:
            raise InputError(
                f"condensation by gains of others; expected {model.num_layers} layers of {model.num_experts} experts"
            )

    @model_validator(mode="after")
    def _of_one_rule(self) -> Self:
        """Refuse fields that the criterion and the schedule do not use, or lack."""
        star, paper, share = self.criterion == "star", self.schedule == "paper", self.schedule == "share"
        if paper and not star:
            raise ValueError("schedule paper moves a cosine; expected criterion star")
        how = f"criterion {self.criterion} under schedule {self.schedule}"
        taken = {"threshold": star and not paper, "target": share, "h_max": paper, "tau": not star, "s1": star}
        for name, takes in taken.items():
            if not takes and getattr(self, name) is not None:
                raise ValueError(f"{how} takes no {name}")
            if takes and getattr(self, name) is None and name not in ("tau", "s1"):
                raise ValueError(f"{how} needs a {name}")
        if share and not star and not self.tau:
            raise ValueError("schedule share from tau 0; expected a start above 0")
        if (self.s1 is None) != (self.s2 is None) or (self.s1 is not None and not self.s1 > (self.s2 or 0.0)):
            raise ValueError(f"s1 {self.s1} and s2 {self.s2}; expected s1 above s2, or neither")
        return self

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value is not None}


class Decisions(Record):
    """Decisions of a plan; one that is absent is not written, so that new kinds leave old plans their hash."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})

    placement: PlacementDecision | None = None
    pipeline: PipelineDecision | None = None
    sample_policy: SamplePolicyDecision | None = None
    rebalancing: RebalancingDecision | None = None
    condensation: CondensationDecision | None = None
    #: How tokens travel; None in old plans, where `Plan.dispatch_model` finds it in the options
    dispatch: DispatchModel | None = None
    wire: Wire | None = None  #: The form in which hidden vectors travel; None: as they are

    @property
    def made(self) -> tuple[Decision, ...]:
        """The decisions made, in the order of their kinds."""
        return tuple(decision for _, decision in self if isinstance(decision, Decision))

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of the decisions made."""
        return tuple(decision.key for decision in self.made)

    def check(self, model: ModelSpec, cluster: Cluster, dispatch_model: DispatchModel) -> None:
        """Refuse decisions that fit neither the model and the cluster nor the dispatch model.

        Raises
        ------
        InputError
            What does not fit.
        """
        for decision in self.made:
            decision.check(model, cluster)
        if self.condensation is not None and self.pipeline is not None and self.pipeline.capacity_factor is not None:
            raise InputError(
                "a fixed capacity beside condensation: buffers hold a row for every copy; take one of them"
            )
        if self.wire is not None and dispatch_model != WIRED:
            raise InputError(f"{self.wire} rows beside {dispatch_model} dispatch; expected {WIRED}")
        if not self.dispatch_models:
            raise InputError(f"{' and '.join(self.names)}, which no dispatch model carries out together; take one")
        if beside := [decision.key for decision in self.made if dispatch_model not in decision.dispatch_models]:
            expected = " or ".join(self.dispatch_models)
            raise InputError(f"{' and '.join(beside)} beside {dispatch_model} dispatch; expected {expected}")

    @property
    def dispatch_models(self) -> tuple[DispatchModel, ...]:
        """Dispatch models under which all decisions can be carried out."""
        return tuple(
            model for model in DISPATCH_MODELS if all(model in decision.dispatch_models for decision in self.made)
        )

    @model_validator(mode="after")
    def _of_registered_kinds(self) -> Self:
        """Take decisions of kinds that were registered, and refuse any other key."""
        others = self.__pydantic_extra__ or {}
        for key, value in others.items():
            if key not in DECISIONS:
                raise ValueError(f"decisions.{key:.40}; this moeplan knows {', '.join(DECISIONS)}, dispatch and wire")
            if not isinstance(value, DECISIONS[key]):
                others[key] = DECISIONS[key].model_validate_json(to_json(value), strict=True)
        return self

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: decision for name, decision in write(self).items() if decision is not None}


# Every kind by its key; one that is added here needs no field of `Decisions`.
DECISIONS: dict[str, type[Decision]] = {
    kind.key: kind
    for kind in (PlacementDecision, PipelineDecision, SamplePolicyDecision, RebalancingDecision, CondensationDecision)
}


def sidecars_in(part: object) -> Iterator[SidecarFile]:
    """The files beside a plan that a part of it names, at any depth."""
    if isinstance(part, SidecarFile):
        yield part
    elif isinstance(part, Mapping) and set(part) == set(SidecarFile.model_fields):
        yield validated(SidecarFile, dict(part), source="plan", what="the name of a file beside it")
    elif isinstance(part, BaseModel):
        yield from sidecars_in(dict(part))
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from sidecars_in(value)
    elif isinstance(part, (list, tuple)) and not (part and isinstance(part[0], int)):  # tables of ids are large
        for item in part:
            yield from sidecars_in(item)
