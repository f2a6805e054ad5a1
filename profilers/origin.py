"""An origin: where a part of a profile comes from."""

import datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import InputError
from .environment import Environment
from .noise import Noise
from .topology import Topology

__all__ = ["Origin", "now"]


class Origin(BaseModel):
    """Where a part of a profile comes from, and when.

    Parameters
    ----------
    kind
        "measured" on this hardware, "described" in words, or read from published "tables".
    environment
        Of what was measured; None otherwise.
    quick
        Whether a short grid was measured, in a short time.
    left_out
        Sizes of the grid that this time did not allow.
    topology, noise
        Which ranks share a node, and how quiet the machine was; None where nothing was measured.
    name
        A description's text, the tables' system and versions, or the merged profile's path; informational.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["measured", "described", "tables"]
    created_at: datetime.datetime
    environment: Environment | None = None
    quick: bool = False
    left_out: Annotated[int, Field(ge=0)] = 0
    topology: Topology | None = None
    noise: Noise | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if (self.kind == "measured") != (self.environment is not None):
            raise InputError(
                f"origin {self.kind!r} with {'an' if self.environment else 'no'} environment; expected one of what was"
                " measured, none of what was described or read"
            )
        if self.kind != "measured" and (self.topology or self.noise or self.quick):
            raise InputError(f"origin {self.kind!r} with a topology or noise; expected them of what was measured only")
        if not (self.name or "").isprintable():
            raise InputError("an origin whose name does not print; expected a description, a system or a path")
        return self


def now() -> datetime.datetime:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)
