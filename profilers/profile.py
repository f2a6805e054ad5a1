"""The Profile: hardware as measured, described or read from tables, and its JSON form."""

import datetime
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from ..errors import InputError
from ..files import canonical_json, check_kind, read_json, validated, write_json
from .cases import CASES
from .cluster import Cluster
from .origin import Environment, Origin, now
from .series import Series

MAX_PROFILE_BYTES = 64 * 2**20


class Profile(BaseModel):
    """The hardware a plan is made for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[2] = 2
    moeplan_version: str
    created_at: datetime.datetime
    complete: bool = True  #: False where the measuring was interrupted: the series hold what was measured until then
    origins: tuple[Origin, ...]  #: Where its parts come from; one unless profiles were merged
    cluster: Cluster
    link_origins: Mapping[str, int] = {}  #: Link class of the cluster to the index of its origin
    #: Key (`Series.key`) to measurements and fit; by case in the order of `CASES`, other cases last
    series: Mapping[str, Series] = {}

    @classmethod
    def make(cls, **fields: Any) -> Self:
        """A profile of these fields, dated and versioned."""
        from importlib.metadata import version

        return cls(moeplan_version=version("moeplan"), created_at=now(), **fields)

    @classmethod
    def of(cls, origin: Origin, cluster: Cluster, series: Iterable[Series] = (), *, complete: bool = True) -> Self:
        """A profile of one origin."""
        origins = dict.fromkeys(cluster.links, 0)
        keyed = {one.key: one for one in series}
        return cls.make(complete=complete, origins=(origin,), cluster=cluster, link_origins=origins, series=keyed)

    @property
    def environment(self) -> Environment | None:
        """Environment of the first part that was measured."""
        return next((origin.environment for origin in self.origins if origin.environment), None)

    @field_validator("series")
    @classmethod
    def _by_case(cls, series: Mapping[str, Series]) -> Mapping[str, Series]:
        order = {name: place for place, name in enumerate(CASES)}
        return dict(sorted(series.items(), key=lambda item: order.get(item[1].case, len(order))))

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if misnamed := [key for key, series in self.series.items() if key != series.key]:
            raise InputError(f"{len(misnamed)} series under another key than their own; expected case/dtype@ranks/link")
        used = {*self.link_origins.values(), *(series.origin for series in self.series.values())}
        if not self.origins or not used <= set(range(len(self.origins))):
            raise InputError(f"parts of {len(self.origins)} origins that name others; expected indices into origins")
        if set(self.link_origins) != set(self.cluster.links):
            raise InputError("link_origins of other links than the cluster's; expected one origin a link")
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
    check_kind(value, source=source, what="a profile")
    return validated(Profile, canonical_json(value), source=source, what="a profile")


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile as JSON, atomically."""
    write_json(path, profile.model_dump(mode="json"))
