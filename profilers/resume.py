"""Checks that a run may continue an earlier profile, and the places that this one holds."""

import dataclasses
from collections.abc import Mapping, Sequence

from ..errors import MismatchError
from .cases.case import Case
from .environment import Environment
from .harness import Place, Start
from .measurement import Measurement
from .profile import Profile
from .topology import numbered

__all__ = ["check_asked", "check_grid", "check_options", "check_world", "places"]


def places(profile: Profile | None) -> dict[Place, Measurement]:
    """The measurements of a profile by their places; none without a profile."""
    return {
        Place(series.case, series.dtype, series.ranks, series.link, tuple(sorted(measured.size.items()))): measured
        for series in (profile.series.values() if profile else ())
        for measured in series.measurements
    }


def check_options(profile: Profile, quick: bool, cases: Sequence[Case]) -> None:
    """Return where a run of these options may continue the profile.

    Raises
    ------
    MismatchError
        It was not measured in one run, or with other options; the first difference is named.
    """
    from importlib.metadata import version

    origin = profile.origins[0]
    if len(profile.origins) != 1 or origin.environment is None:
        raise MismatchError(
            f"the profile to resume has {len(profile.origins)} origins, the first {origin.kind}; expected one that"
            " moeplan profile measured"
        )
    known = {case.name for case in cases}
    unknown = sorted({series.case for series in profile.series.values()} - known)
    _same("a grid that is", _grid(origin.quick), _grid(quick))
    _same("moeplan", profile.moeplan_version, version("moeplan"))
    _same("the case", unknown[0] if unknown else None, None)


def check_asked(profile: Profile, device: str, num_ranks: int | None) -> None:
    """Return where a complete profile is of the device and the ranks asked for; "auto" and None ask for none.

    Raises
    ------
    MismatchError
        It is of others; the first difference is named.
    """
    environment = profile.origins[0].environment
    assert environment is not None  # `check_options` has looked
    if device != "auto":
        _same("the device", "cuda" if environment.backend == "nccl" else "cpu", device)
    if num_ranks is not None:
        _same("ranks", environment.num_ranks, num_ranks)


def check_world(profile: Profile, start: Start) -> None:
    """Return where the ranks run in the environment and on the nodes that the profile was begun with.

    Raises
    ------
    MismatchError
        They do not; the first difference is named.
    """
    begun, environment = profile.origins[0], start.environment
    for field in dataclasses.fields(Environment):
        _same(field.name, getattr(begun.environment, field.name), getattr(environment, field.name))
    if begun.topology is not None:
        _same("ranks on the nodes", begun.topology.node_of_rank, numbered(start.hosts))


def check_grid(measured: Mapping[Place, Measurement], grid: Mapping[Place, int]) -> None:
    """Return where everything measured is a place of the grid, with the work that the grid gives it.

    Raises
    ------
    MismatchError
        Something is not; the first is named.
    """
    for place, measurement in measured.items():
        at = ", ".join(f"{axis} {value}" for axis, value in place.size)
        if place not in grid:
            raise MismatchError(
                f"the profile to resume has {place.key} at {at}, which this run would not measure; run it without"
                " --resume"
            )
        _same(f"the work of {place.key} at {at}", measurement.work, grid[place])


def _grid(quick: bool) -> str:
    return "quick" if quick else "full"


def _same(name: str, earlier: object, now: object) -> None:
    if earlier != now:
        raise MismatchError(
            f"the profile to resume has {name} {earlier}, this run {now}; figures of the two do not belong in one"
            " profile: run it as it was begun, or without --resume"
        )
