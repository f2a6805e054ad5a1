"""Chunks into which MoE layers are cut."""

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from ...errors import InputError
from ...profilers.cluster import Cluster
from ...traces.model import ModelSpec
from .decision import Decision, Record

SHARE_DIGITS = 9  # of a layer; boundaries of chunks are rounded to these
LEAST_SHARE = 1e-8  # so that no chunk is empty then
MAX_DEGREE = 65_536
MAX_CAPACITY_FACTOR = 1024
Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE)]
Share = Annotated[float, Field(ge=LEAST_SHARE, le=1)]


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
    unwritten = ("shares", "capacity_factor")

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
