"""What a plan may decide: which expert is where, how deep each layer is pipelined, where samples go.

A rule between decisions, or between one and the model, is the Plan's (`plan.py`).
"""

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from ..solvers.placement import Placement, ReplicaRule
from ..traces.model import NOT_ROUTED

__all__ = [
    "MAX_CAPACITY_FACTOR",
    "SHARE_DIGITS",
    "ChunkShares",
    "Decision",
    "Decisions",
    "Degree",
    "DispatchModel",
    "PipelineDecision",
    "PlacementDecision",
    "Record",
    "SamplePolicyDecision",
    "Sha256",
    "SidecarFile",
    "boundaries",
]

SHARE_DIGITS = 9  # of a layer; boundaries of chunks are rounded to these
LEAST_SHARE = 1e-8  # so that no chunk is empty then

MAX_DEGREE = 65_536
MAX_CAPACITY_FACTOR = 1024
DispatchModel = Literal["standard", "coherent", "migrating"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ExpertId = Annotated[int, Field(ge=0, lt=NOT_ROUTED)]
NumSlots = Annotated[int, Field(ge=0, le=NOT_ROUTED)]
Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE)]
Layer = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=LEAST_SHARE, le=1)]


class Record(BaseModel):
    """A part of the plan: frozen, strict about keys, finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


class PlacementDecision(Record):
    """Which expert is in which slot (`solvers.placement` holds the rules)."""

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


def boundaries(shares: Sequence[float]) -> list[float]:
    """Where the chunks of these shares of a layer begin and, last, end: from 0 to 1, rounded."""
    inner = itertools.accumulate(shares[:-1], initial=0.0)
    return [*(round(end, SHARE_DIGITS) for end in inner), 1.0]


class ChunkShares(Record):
    """The share of every MoE layer in each of its chunks, in the order of dispatch; a pass's degrees are their numbers.

    Parameters
    ----------
    forward, backward
        A tuple a layer that sums to 1; `backward` is None where no backward pass was planned.
    """

    forward: tuple[tuple[Share, ...], ...]
    backward: tuple[tuple[Share, ...], ...] | None


class PipelineDecision(Record):
    """Into how many chunks each MoE layer is cut, so that its exchanges and its experts overlap.

    Parameters
    ----------
    forward, backward
        A degree a layer for each pass; `backward` is None where no backward pass was planned.
    shares
        Of the chunks where they are unequal; None: equal ones.
    capacity_factor
        Every expert's buffer over its mean rows, padded to a multiple of both degrees; None: no fixed capacity.
    """

    forward: tuple[Degree, ...]
    backward: tuple[Degree, ...] | None
    shares: ChunkShares | None = None
    capacity_factor: Annotated[float, Field(gt=0, le=MAX_CAPACITY_FACTOR)] | None = None

    @model_validator(mode="after")
    def _of_whole_layers(self) -> Self:
        """Refuse shares that are not as many as the degrees say, or do not make whole layers."""
        if self.shares is None:
            return self
        passes = {"forward": (self.forward, self.shares.forward), "backward": (self.backward, self.shares.backward)}
        for name, (degrees, shares) in passes.items():
            if degrees != (None if shares is None else tuple(map(len, shares))):
                raise ValueError(f"{name} shares of other chunks than the degrees; expected one a chunk of every layer")
            if wrong := [sum(one) for one in shares or () if not math.isclose(sum(one), 1)]:
                raise ValueError(f"{name} shares of a layer sum to {wrong[0]:.6g}; expected 1")
        return self

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        optional = ("shares", "capacity_factor")  # not written where absent: plans without them keep their hash
        return {name: value for name, value in write(self).items() if value is not None or name not in optional}


class SidecarFile(Record):
    """A file beside the plan, known by its hash; `file` is a plain name."""

    file: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")
    sha256: Sha256


class SamplePolicyDecision(Record):
    """Which layers re-home their samples, how, and by what prediction of the next layer.

    Parameters
    ----------
    layers
        Ordinals of the MoE layers whose combine delivers samples to new homes, ascending.
    predictor
        None: only this layer's routing decides.
    """

    method: str
    layers: tuple[Layer, ...]
    predictor: SidecarFile | None = None


Decision = PlacementDecision | PipelineDecision | SamplePolicyDecision


class Decisions(Record):
    """What the plan decides; a part that is absent is not written, so that new kinds leave old plans their hash."""

    placement: PlacementDecision | None = None
    pipeline: PipelineDecision | None = None
    sample_policy: SamplePolicyDecision | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Those decided, by their keys."""
        return tuple(name for name, decision in self if decision is not None)

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: decision for name, decision in write(self).items() if decision is not None}
