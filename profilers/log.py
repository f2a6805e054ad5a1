"""Log of a run: the reports of its ranks, the profile so far, and the earlier run that it continues."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from ..errors import MismatchError, UsageError
from .cases.case import Case
from .cluster import Cluster
from .fits.fitting import fit_series
from .harness import Place, Start, Step
from .measurement import PAIR, Measurement
from .origin import Environment, GridName, Noise, Origin, now
from .profile import Profile
from .series import Series
from .topology import Pair, Topology, islands, measured_links, numbered

SAVE_S = 15.0


class Log:
    """Reports of the ranks so far, added to the measurements of an earlier run.

    Parameters
    ----------
    cases, grid
        Cases and sizes to measure.
    earlier
        The profile that this run continues.
    on_progress, on_profile
        As `measure` takes them.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        *,
        grid: GridName,
        earlier: Profile | None,
        on_progress: Callable[[Step], None] | None,
        on_profile: Callable[[Profile], None] | None,
    ) -> None:
        self.start: Start | None = None
        self.measured: dict[Place, Measurement] = _places(earlier)
        self._cases = {case.name: case for case in cases}
        self._grid = grid
        self._earlier = earlier
        self._on_progress, self._on_profile = on_progress, on_profile
        origin = earlier.origins[0] if earlier else None
        self._left_out = origin.left_out if origin else 0
        self._reference_s = list(origin.noise.reference_s) if origin and origin.noise else []
        self._saved = time.monotonic()

    def receive(self, report: Start | Step) -> None:
        """Keep a report and hand it on.

        Raises
        ------
        UsageError
            The ranks lie unevenly on hosts.
        MismatchError
            This world is not the one whose profile is continued, or would measure other sizes.
        """
        if isinstance(report, Start):
            self.start = report
            cluster_of(report.hosts)  # refuses an uneven world before time is spent on it
            if self._earlier is not None:
                check_options(self._earlier, self._grid, tuple(self._cases.values()))
                _check_world(self._earlier, report)
                _check_grid(self.measured, report.grid)
            return
        self.measured[report.place] = report.measurement
        self._reference_s.append(report.reference_s)
        self._left_out = report.total - report.done
        if self._on_progress is not None:
            self._on_progress(report)
        if self._on_profile is not None and time.monotonic() - self._saved > SAVE_S:
            self._on_profile(self.profile(complete=False, fitted=False))
            self._saved = time.monotonic()

    def profile(self, *, complete: bool, fitted: bool = True) -> Profile:
        """Profile of all measurements so far."""
        assert self.start is not None
        cluster = cluster_of(self.start.hosts)
        series = self._series(fitted)
        links = measured_links(cluster, series)
        origin = Origin(
            kind="measured",
            created_at=now(),
            environment=self.start.environment,
            quick=self._grid == "quick",
            full=self._grid == "full",
            left_out=self._left_out if complete else 0,
            missing=self._missing() if complete else {},
            topology=_topology(self.start.hosts, self.measured),
            noise=Noise.of(self.measured.values(), self._reference_s),
        )
        return Profile.of(origin, dataclasses.replace(cluster, links=links), series.values(), complete=complete)

    def _missing(self) -> dict[str, int]:
        """Sizes of each series of the grid that were not measured, of those that lack some."""
        assert self.start is not None
        return dict(Counter(place.key for place in self.start.grid if place not in self.measured))

    def _series(self, fitted: bool) -> dict[str, Series]:
        """The series of the cases, in their order."""
        order = list(self._cases)
        keyed: dict[str, list[Place]] = {}
        for place in sorted(self.measured, key=lambda place: order.index(place.case)):
            keyed.setdefault(place.key, []).append(place)
        return {key: self._fitted(places, fitted) for key, places in keyed.items()}

    def _fitted(self, places: Sequence[Place], fitted: bool) -> Series:
        place, case = places[0], self._cases[places[0].case]
        measurements = tuple(self.measured[place] for place in places)
        return Series(
            case=place.case,
            dtype=place.dtype,
            ranks=place.ranks,
            link=place.link,
            unit=case.unit,
            measurements=measurements,
            fit=fit_series(case, place.ranks, measurements) if fitted else None,
        )


def cluster_of(hosts: Sequence[str]) -> Cluster:
    """The cluster the ranks form, without links: consecutive ranks share a host."""
    runs = [len(list(run)) for _, run in groupby(hosts)]
    if len(runs) != len(set(hosts)) or len(set(runs)) != 1:
        raise UsageError(
            f"{len(hosts)} ranks lie on {len(set(hosts))} hosts in runs of {runs}; expected consecutive ranks, the same"
            " number on each host"
        )
    return Cluster(len(runs), runs[0])


def check_options(profile: Profile, grid: GridName, cases: Sequence[Case]) -> None:
    """Return where a run of these options may continue the profile.

    Raises
    ------
    MismatchError
        The profile was not measured in one run, or with other options; the first difference is named.
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
    _same("a grid that is", origin.grid, grid)
    _same("moeplan", profile.moeplan_version, version("moeplan"))
    _same("the case", unknown[0] if unknown else None, None)


def check_asked(profile: Profile, device: str, num_ranks: int | None) -> None:
    """Return where a complete profile is of the device and the ranks asked for; "auto" and None ask for none.

    Raises
    ------
    MismatchError
        The profile is of other options; the first difference is named.
    """
    environment = profile.origins[0].environment
    assert environment is not None  # `check_options` has looked
    if device != "auto":
        _same("the device", "cuda" if environment.backend == "nccl" else "cpu", device)
    if num_ranks is not None:
        _same("ranks", environment.num_ranks, num_ranks)


def _places(profile: Profile | None) -> dict[Place, Measurement]:
    """The measurements of a profile by their places; none without a profile."""
    return {
        Place(series.case, series.dtype, series.ranks, series.link, tuple(sorted(measured.size.items()))): measured
        for series in (profile.series.values() if profile else ())
        for measured in series.measurements
    }


def _check_world(profile: Profile, start: Start) -> None:
    """Refuse ranks in another environment or on other nodes than the profile's; the first difference is named."""
    begun, environment = profile.origins[0], start.environment
    for field in dataclasses.fields(Environment):
        _same(field.name, getattr(begun.environment, field.name), getattr(environment, field.name))
    if begun.topology is not None:
        _same("ranks on the nodes", begun.topology.node_of_rank, numbered(start.hosts))


def _check_grid(measured: Mapping[Place, Measurement], grid: Mapping[Place, int]) -> None:
    """Refuse measurements outside the grid, or of other work than the grid gives; the first is named."""
    for place, measurement in measured.items():
        at = ", ".join(f"{axis} {value}" for axis, value in place.size)
        if place not in grid:
            raise MismatchError(
                f"the profile to resume has {place.key} at {at}, which this run would not measure; run it without"
                " --resume"
            )
        _same(f"the work of {place.key} at {at}", measurement.work, grid[place])


def _topology(hosts: Sequence[str], measured: Mapping[Place, Measurement]) -> Topology:
    """The nodes of the ranks, and the islands by the times of all pairs, if all were measured."""
    pairs: dict[int, dict[Pair, float]] = {}
    for measurement in measured.values():
        if PAIR[0] in measurement.size:
            pair = measurement.size[PAIR[0]], measurement.size[PAIR[1]]
            pairs.setdefault(measurement.work, {})[pair] = measurement.median_s
    every = len(hosts) * (len(hosts) - 1) // 2
    whole = [pairs[work] for work in sorted(pairs) if len({frozenset(pair) for pair in pairs[work]}) == every]
    if len(hosts) < 3 or not whole:
        return Topology(node_of_rank=numbered(hosts))
    island_of_rank, ratio = islands((whole[0], whole[-1]), len(hosts))
    return Topology(node_of_rank=numbered(hosts), island_of_rank=island_of_rank, ratio=ratio)


def _same(name: str, earlier: object, now: object) -> None:
    if earlier != now:
        raise MismatchError(
            f"the profile to resume has {name} {earlier}, this run {now}; figures of the two do not belong in one"
            " profile: run it as it was begun, or without --resume"
        )
