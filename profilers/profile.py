"""The Profile: what was measured or described of the hardware, and its JSON form."""

import datetime
import os
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from ..errors import InputError
from ..files import canonical_json, read_json, validated, write_json
from .cluster import Cluster
from .environment import Environment
from .fit import Fit
from .measurement import Measurement

__all__ = ["CaseResult", "Profile", "load", "parse", "save"]

MAX_PROFILE_BYTES = 64 * 2**20


class CaseResult(BaseModel):
    """The measurements of one case, in the order taken; `unit` is what their work counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    unit: Literal["bytes", "macs"]
    measurements: tuple[Measurement, ...]


class Profile(BaseModel):
    """The hardware a plan is made for.

    Parameters
    ----------
    source
        "measured", or "described": then there is no environment, no case and no fit, only the cluster.
    complete
        False where the measuring was interrupted: the cases hold what was measured until then.
    fits
        Case to its fitted seconds over work.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    moeplan_version: str
    created_at: datetime.datetime
    source: Literal["measured", "described"]
    complete: bool = True
    cluster: Cluster
    environment: Environment | None = None
    cases: Mapping[str, CaseResult] = {}
    fits: Mapping[str, Fit] = {}

    @classmethod
    def make(cls, **fields: Any) -> Self:
        """A profile of these fields, dated and versioned."""
        from importlib.metadata import version

        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        return cls(moeplan_version=version("moeplan"), created_at=now, **fields)

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if not "".join(self.cases).isprintable():
            raise InputError("a case whose name does not print; expected names of cases")
        if unmeasured := sorted(set(self.fits) - set(self.cases)):
            raise InputError(
                f"{len(unmeasured)} fits of cases that are not in it; expected a fit only of what was measured"
            )
        if (self.source == "measured") != (self.environment is not None) or (self.source == "described" and self.cases):
            raise InputError(
                f"source {self.source!r} with {len(self.cases)} cases and"
                f" {'an' if self.environment else 'no'} environment; expected both of a measured profile, neither of a"
                " described one"
            )
        return self


def load(path: str | os.PathLike[str]) -> Profile:
    """The profile in a JSON file.

    Raises
    ------
    InputError
        The file is no profile, of another schema version, or holds what no measurement can give.
    """
    return parse(read_json(path, what="a profile", max_bytes=MAX_PROFILE_BYTES), str(path))


def parse(value: Any, source: str) -> Profile:
    """The profile in a decoded JSON value; `source` names it in errors."""
    if not isinstance(value, dict) or "schema_version" not in value:
        raise InputError(f"{source}: no schema_version; expected a profile written by moeplan profile")
    return validated(Profile, canonical_json(value), source=source, what="a profile")


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile as JSON, atomically."""
    write_json(path, profile.model_dump(mode="json"))
