"""An origin: where a part of a profile comes from."""

import datetime
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from ..errors import InputError
from .environment import Environment

__all__ = ["Origin", "now"]


class Origin(BaseModel):
    """Where a part of a profile comes from, and when.

    Parameters
    ----------
    kind
        "measured" on this hardware, "described" in words, or read from published "tables".
    environment
        Of what was measured; None otherwise.
    name
        A description's text, the tables' system and versions, or the merged profile's path; informational.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["measured", "described", "tables"]
    created_at: datetime.datetime
    environment: Environment | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if (self.kind == "measured") != (self.environment is not None):
            raise InputError(
                f"origin {self.kind!r} with {'an' if self.environment else 'no'} environment; expected one of what was"
                " measured, none of what was described or read"
            )
        if not (self.name or "").isprintable():
            raise InputError("an origin whose name does not print; expected a description, a system or a path")
        return self


def now() -> datetime.datetime:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)
