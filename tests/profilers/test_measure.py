"""Measuring with real ranks: figures, nodes, checks of the answers, interrupts, and going on after one."""

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import MismatchError, RankError, UsageError
from moeplan.profilers.cases import CASES, PLANNED
from moeplan.profilers.cases.case import Case
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.harness import (
    TOTAL_S,
    Interleaved,
    Place,
    Request,
    Start,
    Step,
    _depths,
    _depths_along,
    measure_cases,
)
from moeplan.profilers.log import Log, cluster_of
from moeplan.profilers.measure import measure
from moeplan.profilers.measurement import MIN_SAMPLES, Measurement, median_interval
from moeplan.profilers.origin import Environment, Noise
from moeplan.profilers.profile import Profile
from moeplan.profilers.sampling import MAX_REPEATS, sample
from moeplan.profilers.world import World
from tests.builders import known
from tests.profilers.small_cases import (
    Lapped,
    Misdelivering,
    Sleeping,
    SleepingPairs,
    SmallAllToAll,
    SmallGemm,
    by_halves,
    interrupted,
)

HEARD: list[Step] = []
TOLD: list[Start | Step] = []
CASES_OF_A_TEST: Sequence[Case] = (SmallGemm(), SmallAllToAll(), SleepingPairs())


@pytest.fixture(scope="module")
def measured() -> Profile:
    """Four ranks on two "nodes" whose fast pairs are not those of the nodes."""
    HEARD.clear()
    profile = measure(
        num_ranks=4, device="cpu", grid="quick", on_progress=HEARD.append, cases=CASES_OF_A_TEST, host_of=by_halves
    )
    assert profile is not None
    return profile


def test_every_size_is_measured_and_told_on_the_way(measured: Profile) -> None:
    assert measured.complete
    assert measured.origins[0].left_out == 0
    total = 3 + 2 * 4 + 12
    assert [(step.done, step.total) for step in HEARD] == [(done, total) for done in range(1, total + 1)]
    assert HEARD[-1].remaining_s == 0 < HEARD[0].remaining_s
    told = [step.measurement for step in HEARD if step.place.key == "gemm/fp32"]
    assert told == list(measured.series["gemm/fp32"].measurements)


def test_collectives_are_measured_between_nodes_and_inside_each(measured: Profile) -> None:
    assert list(measured.series) == [
        "gemm/fp32",
        "all_to_all/uint8@4/inter",
        "all_to_all/uint8@2/intra",
        "point_to_point/fp32@2/intra",
        "point_to_point/fp32@2/inter",
    ]
    works = {key: sorted(one.work for one in series.measurements) for key, series in measured.series.items()}
    assert works["all_to_all/uint8@4/inter"] == [3 * 4**power for power in (3, 5, 7, 9)]
    assert works["all_to_all/uint8@2/intra"] == [4**power for power in (3, 5, 7, 9)]
    pairs = {
        (one.size["first"], one.size["second"]) for one in measured.series["point_to_point/fp32@2/intra"].measurements
    }
    assert pairs == {(0, 1), (2, 3)}


def test_the_nodes_are_told_by_host_and_the_islands_by_time(measured: Profile) -> None:
    topology = known(measured.origins[0].topology)
    assert topology.node_of_rank == (0, 0, 1, 1)
    assert topology.island_of_rank == (0, 1, 0, 1)
    assert 2 < known(topology.ratio) < 12  # 8 where nothing else runs
    assert not topology.agrees
    assert (measured.cluster.num_nodes, measured.cluster.devices_per_node) == (2, 2)


@pytest.mark.parametrize(
    ("samples", "mean"),
    [([3.0], 3.0), ([1.0, 3.0], 2.0), ([1.0, 2.0, 90.0], 2.0), ([0.1, *[2.0] * 20, *[3.0] * 20, 90.0, 91.0], 98 / 39)],
)
def test_fits_go_through_means_that_no_single_call_decides(samples: list[float], mean: float) -> None:
    """Of 43 calls 2 at each end are left out: 0.1 and a 2, 90 and 91."""
    assert Measurement.of({"bytes": 8}, 8, samples).mean_s == pytest.approx(mean)


def test_samples_are_kept_raw_and_enough_and_the_environment_and_the_noise_are_told(measured: Profile) -> None:
    for one in (one for result in measured.series.values() for one in result.measurements):
        assert len(one.samples_s) >= MIN_SAMPLES
        assert one.min_s <= one.median_low_s <= one.median_s <= one.median_high_s <= one.max_s
    (origin,) = measured.origins
    place, noise = known(origin.environment), known(origin.noise)
    assert (place.num_ranks, place.num_hosts, place.torch) == (4, 2, torch.__version__)
    assert noise.sizes == len(HEARD) == len(noise.reference_s)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[World]:
    """A world of one rank in this process, whose reports are in `TOLD`."""
    TOLD.clear()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield World(0, 1, "cpu", ("host",), TOLD.append)
    dist.destroy_process_group()


def test_a_wrong_answer_ends_the_run_with_case_and_size(alone: World) -> None:
    with pytest.raises(RankError, match=r"^all_to_all at bytes 16384 gave a wrong answer: "):
        measure_cases(alone, Request((Misdelivering(),), "full"))
    sizes = [report.measurement.size for report in TOLD if isinstance(report, Step)]
    assert sizes == [{"bytes": 64}, {"bytes": 1024}]


def test_what_is_done_is_not_measured_again(alone: World) -> None:
    done = frozenset({Place("gemm", "fp32", 1, None, (("k", 32), ("m", 64), ("n", 32)))})
    measure_cases(alone, Request((SmallGemm(),), "quick", done))
    steps = [report for report in TOLD if isinstance(report, Step)]
    assert [(step.measurement.size["m"], step.done, step.total) for step in steps] == [(8, 2, 3), (512, 3, 3)]


def test_what_has_laps_is_timed_by_them_between_other_work(alone: World) -> None:
    beside = Interleaved(alone, Request((Lapped(microseconds=(5000,)), Sleeping(name="router", microseconds=(5000,)))))
    for _ in range(3):
        beside.once()
    lapped, whole = [report.measurement.samples_s for report in beside.reports() if isinstance(report, Step)]
    assert len(lapped) == len(whole) == 3
    assert all(0.01 <= seconds < 0.1 for seconds in lapped), "100 ms of each call are in no lap"
    assert all(seconds >= 0.005 for seconds in whole)


def test_each_curve_is_measured_at_its_ends_first() -> None:
    sizes = [{"bytes": count, "kept": kept} for count in (1, 2, 4) for kept in (10, 50)]
    assert _depths_along("bytes", sizes) == [0, 0, 1, 1, 0, 0]
    assert _depths_along(None, sizes) == _depths(6)


@given(count=st.integers(0, 60))
def test_ends_come_first_then_what_lies_halfway(count: int) -> None:
    depths = _depths(count)
    assert len(depths) == count
    for depth in range(max(depths, default=-1) + 1):
        met = [place for place, of_place in enumerate(depths) if of_place <= depth]
        assert met[0] == 0
        assert met[-1] == count - 1
        gaps = np.diff(met)
        assert len(gaps) == 0 or gaps.max() <= -(-(count - 1) // 2**depth)


@pytest.mark.usefixtures("alone")
def test_what_the_time_leaves_out_is_between_the_ends_and_told_by_series(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOTAL_S, "quick", -1.0)
    measure_cases(alone, Request((SmallGemm(),), "quick"))
    assert [type(report) for report in TOLD] == [Start]
    log = Log((SmallGemm(),), grid="quick", earlier=None, on_progress=None, on_profile=None)
    log.receive(TOLD[0])
    assert log.profile(complete=True).origins[0].missing == {"gemm/fp32": 3}


def test_without_cases_a_full_grid_has_all_and_others_those_that_planning_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for grid, cases in (("full", tuple(CASES.values())), ("default", PLANNED), ("quick", PLANNED)):
        profile = measured_of(monkeypatch, reports(3), grid=grid)
        assert (REQUESTS[-1].cases, REQUESTS[-1].grid, profile.origins[0].grid) == (cases, grid, grid)


def test_hosts_make_a_cluster_only_when_even_and_consecutive() -> None:
    assert cluster_of(["a", "a", "b", "b", "c", "c"]) == Cluster(3, 2)
    for hosts in (["a", "a", "b"], ["a", "b", "a", "b"]):
        with pytest.raises(UsageError, match="expected consecutive ranks"):
            cluster_of(hosts)


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


@pytest.mark.parametrize(
    ("device", "told"),
    [("tpu", "expected auto, cpu or cuda"), ("", "expected auto"), pytest.param("cuda", "no GPU", marks=NO_GPU)],
)
def test_a_device_that_is_not_there_is_refused(device: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        measure(device=device)


def reports(count: int, hosts: tuple[str, ...] = ("host", "host")) -> list[Start | Step]:
    """What rank 0 says of the first sizes of an all-to-all."""
    sizes = (10, 1000, 100_000)
    grid = {Place("all_to_all", "uint8", 2, "intra", (("bytes", 2 * size),)): size for size in sizes}
    found: list[Start | Step] = [Start(Environment.of("cpu", hosts), hosts, grid)]
    for done, (place, size) in enumerate(list(grid.items())[:count], 1):
        one = Measurement.of({"bytes": 2 * size}, size, [1e-6 + 1e-9 * size] * 6)
        found.append(Step(place, one, 1e-3, done, 3, 1.0))
    return found


def world_of(says: list[Start | Step], ends: BaseException | None = None) -> Callable[..., None]:
    """A stand-in for `run_world` that says these reports, keeps the request, and ends so."""

    def run(*given: object, on_progress: Callable[[Start | Step], None], **_: object) -> None:
        REQUESTS.append(given[2])  # type: ignore[arg-type]
        for report in says:
            on_progress(report)
        if ends is not None:
            raise ends

    return run


REQUESTS: list[Request] = []
RUN = "moeplan.profilers.measure.run_world"


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Profile:
    """A profile that Ctrl-C ended after two of three sizes."""
    return measured_of(monkeypatch, reports(2), KeyboardInterrupt())


def measured_of(
    monkeypatch: pytest.MonkeyPatch, says: list[Start | Step], ends: BaseException | None = None, **options: Any
) -> Profile:
    """The profile of a world that says these reports and ends so."""
    monkeypatch.setattr(RUN, world_of(says, ends))
    return known(measure(device="cpu", **options))


def test_an_interrupt_keeps_what_was_measured_for_a_resume(monkeypatch: pytest.MonkeyPatch, half: Profile) -> None:
    assert not half.complete
    assert half.cluster.links["intra"].s_per_byte == pytest.approx(1e-9)
    rest = [report for report in reports(3) if isinstance(report, Start) or report.done == 3]
    whole = measured_of(monkeypatch, rest, resume=half)
    assert whole.complete
    assert {place.size for place in REQUESTS[-1].done} == {(("bytes", 20),), (("bytes", 2000),)}
    series = whole.series["all_to_all/uint8@2/intra"]
    assert [one.size["bytes"] for one in series.measurements] == [20, 2000, 200_000]
    assert series.fit is not None
    noise = known(whole.origins[0].noise)
    assert (noise.sizes, len(noise.reference_s)) == (3, 3)


def test_a_finished_profile_is_resumed_without_starting_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured_of(monkeypatch, reports(3))
    monkeypatch.setattr(RUN, interrupted)
    assert measure(device="cpu", resume=whole) is whole
    assert measure(num_ranks=2, resume=whole) is whole
    with pytest.raises(MismatchError, match="has ranks 2, this run 4"):
        measure(resume=whole, num_ranks=4)
    with pytest.raises(MismatchError, match="has the device cpu, this run cuda"):
        measure(resume=whole, device="cuda")


KEY = "all_to_all/uint8@2/intra"
Change = Callable[[Profile], dict[str, Any]]


def series(key: str = KEY, **fields: Any) -> Change:
    """A profile whose one series differs in this."""
    return lambda half: {"series": {key: half.series[KEY].model_copy(update={"fit": None, **fields})}}


@pytest.mark.parametrize(
    ("options", "hosts", "change", "told"),
    [
        ({"grid": "quick"}, 2 * ["host"], lambda half: {}, "has a grid that is default, this run quick"),
        ({"grid": "full"}, 2 * ["host"], lambda half: {}, "has a grid that is default, this run full"),
        ({"cases": (SmallGemm(),)}, 2 * ["host"], lambda half: {}, "has the case all_to_all, this run None"),
        ({}, 4 * ["host"], lambda half: {}, "has num_ranks 2, this run 4"),
        ({}, ["one", "two"], lambda half: {}, "has num_hosts 1, this run 2"),
        ({}, 2 * ["host"], lambda half: {"moeplan_version": "0.0.1"}, r"has moeplan 0\.0\.1, this run "),
        ({}, 2 * ["host"], lambda half: {"origins": 2 * half.origins}, "has 2 origins"),
        ({}, 2 * ["host"], series(measurements=(Measurement.of({"k": 5}, 1, [1.0]),)), "at k 5"),
        ({}, 2 * ["host"], series(measurements=(Measurement.of({"bytes": 20}, 9, [1.0]),)), "the work of"),
        ({}, 2 * ["host"], series("all_to_all/uint8@64/intra", ranks=64), "@64/intra at bytes 20"),
        ({}, 2 * ["host"], series("all_to_all/int3@2/intra", dtype="int3"), "all_to_all/int3@2"),
        ({}, 2 * ["host"], series("all_to_all/uint8@2/inter", link="inter"), "@2/inter"),
    ],
)
def test_what_this_run_does_not_measure_is_not_resumed(
    monkeypatch: pytest.MonkeyPatch, half: Profile, options: dict[str, Any], hosts: list[str], change: Change, told: str
) -> None:
    resume = half.model_copy(update=change(half))
    with pytest.raises(MismatchError, match=told):
        measured_of(monkeypatch, reports(0, tuple(hosts)), resume=resume, **options)


def test_torch_is_kept_from_printing_frames_when_a_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    measured_of(monkeypatch, reports(1))
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"


def test_the_profile_so_far_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeplan.profilers.log.SAVE_S", 0.0)
    told: list[Profile] = []
    measured_of(monkeypatch, reports(3), on_profile=told.append)
    assert [profile.complete for profile in told] == [False] * 3
    assert [len(profile.series["all_to_all/uint8@2/intra"].measurements) for profile in told] == [1, 2, 3]


def test_an_interrupt_before_the_first_figure_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUN, interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(device="cpu")


@given(samples=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=60))
def test_the_interval_is_the_narrowest_that_holds_the_median_95_times_of_100(samples: list[float]) -> None:
    n, ascending = len(samples), sorted(samples)

    def coverage(k: int) -> float:
        return float(1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n)

    k = max((k for k in range(1, n // 2 + 1) if coverage(k) >= 0.95), default=1)
    assert median_interval(samples) == (ascending[k - 1], ascending[n - k])


class Scripted:
    """A clock whose calls take seconds off a list."""

    def __init__(self, seconds: Iterator[float]) -> None:
        self.seconds = seconds
        self.cold = False

    def flush(self) -> None:
        self.cold = True

    def time(self, call: Callable[[], Any]) -> float:
        assert self.cold, "the call finds what the one before it left in the caches"
        self.cold = False
        call()
        return next(self.seconds)


@pytest.mark.usefixtures("alone")
def test_a_steady_call_is_repeated_six_times_and_an_unsteady_one_as_often_as_there_is_time() -> None:
    calls: list[int] = []
    steady = sample(Scripted(itertools.repeat(1e-3)), lambda: calls.append(1), budget_s=5.0)
    assert len(steady) == MIN_SAMPLES == len(calls)
    unsteady = sample(Scripted(itertools.cycle([1e-3, 3e-3])), lambda: None, budget_s=5.0)
    assert len(unsteady) == MAX_REPEATS
    settling = sample(Scripted(itertools.chain([2e-3] * 6, [1e-3, 5e-3], itertools.repeat(1e-3))), print, budget_s=5.0)
    assert len(settling) == MIN_SAMPLES


@pytest.mark.usefixtures("alone")
def test_time_that_is_spent_ends_the_repeats_but_not_before_there_is_an_interval() -> None:
    assert len(sample(Scripted(itertools.cycle([1e-3, 3e-3])), lambda: None, budget_s=0.0)) == 1

    def slow() -> None:
        for _ in range(300_000):
            pass

    taken = len(sample(Scripted(itertools.cycle([1e-3, 3e-3])), slow, budget_s=0.02))
    assert 1 <= taken < MAX_REPEATS


def sized(*samples_s: float) -> Measurement:
    return Measurement.of({"bytes": 8}, 8, samples_s)


def test_a_machine_is_noisy_when_a_fifth_of_the_medians_is_loose_or_the_reference_drifts() -> None:
    tight, loose, few = sized(*[1.0] * 6), sized(1.0, 1.0, 1.0, 1.0, 1.0, 1.3), sized(1.0)
    quiet = Noise.of([tight] * 4 + [loose], [1e-3, 1.1e-3])
    assert (quiet.sizes, quiet.wide, quiet.noisy) == (5, 1, False)
    assert "quiet enough: 1 of 5 medians (20 %)" in str(quiet)
    noisy = Noise.of([tight] * 3 + [loose, few], [1e-3, 1.1e-3])
    assert (noisy.wide, noisy.noisy) == (2, True)
    assert "NOISY: 2 of 5 medians (40 %)" in str(noisy)
    drifting = Noise.of([tight], [1e-3] * 5 + [9e-3] * 5)
    assert drifting.noisy
    assert "varied 9.00 times" in str(drifting)
