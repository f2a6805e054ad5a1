"""Measuring with real ranks: figures, checks of the answers, interrupts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moeplan.errors import RankError, UsageError
from moeplan.profilers.cases import CASES
from moeplan.profilers.cases.all_to_all import AllToAll
from moeplan.profilers.cases.gemm import Gemm
from moeplan.profilers.cluster import Cluster, Link
from moeplan.profilers.environment import Environment
from moeplan.profilers.fits.fit import MIN_SLOPE, AlphaBeta, Fit, fit
from moeplan.profilers.harness import MIN_REPEATS, Case, Request, Start, Step, measure_cases
from moeplan.profilers.measure import _cluster, _links, measure
from moeplan.profilers.measurement import Measurement
from moeplan.profilers.profile import Profile, load, save
from moeplan.profilers.world import World
from tests.profilers.small_cases import Misdelivering, SmallAllToAll, SmallGemm

NUM_RANKS = 2
HEARD: list[Step] = []


@pytest.fixture(scope="module")
def measured() -> Profile:
    HEARD.clear()
    profile = measure(
        num_ranks=NUM_RANKS, device="cpu", quick=True, on_progress=HEARD.append, cases=(SmallGemm(), SmallAllToAll())
    )
    assert profile is not None
    return profile


def test_every_size_is_measured_and_told_on_the_way(measured: Profile) -> None:
    assert measured.complete
    assert [(step.done, step.total) for step in HEARD] == [(done, 7) for done in range(1, 8)]
    told = [(step.case, step.measurement) for step in HEARD]
    assert told == [(result.case, one) for result in measured.series.values() for one in result.measurements]


def test_samples_are_kept_raw_and_enough(measured: Profile) -> None:
    for result in measured.series.values():
        for one in result.measurements:
            assert len(one.samples_s) >= MIN_REPEATS
            assert min(one.samples_s) == one.min_s <= one.median_s <= one.p95_s <= one.max_s == max(one.samples_s)


def test_work_counts_multiply_adds_and_bytes_that_leave_a_rank(measured: Profile) -> None:
    assert [one.work for one in measured.series["gemm/fp32"].measurements] == [m * 32 * 32 for m in (8, 64, 512)]
    assert [one.work for one in measured.series["all_to_all/uint8@2/intra"].measurements] == [64, 1024, 16384, 262144]


def test_one_host_of_ranks_is_a_cluster_with_an_intra_link_from_the_all_to_all(measured: Profile) -> None:
    found = measured.series["all_to_all/uint8@2/intra"].fit
    assert found is not None
    grows = found.model.b_s > MIN_SLOPE  # four small sizes on a busy machine may not
    links = {"intra": Link(found.model.a_s, found.model.b_s)} if grows else {}
    assert measured.cluster == Cluster(1, NUM_RANKS, links)


def test_the_environment_is_told(measured: Profile) -> None:
    environment = measured.environment
    assert environment is not None
    assert environment.num_ranks == NUM_RANKS
    assert environment.num_hosts == 1
    assert environment.backend == "gloo"
    assert environment.torch == torch.__version__
    assert environment.driver is None


def test_a_measured_profile_survives_its_file(measured: Profile, tmp_path: Path) -> None:
    save(measured, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == measured


def test_a_wrong_answer_ends_the_run_with_case_and_size(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    request = Request((Misdelivering(min_ranks=1),), quick=True)
    told: list[Start | Step] = []
    message = r"^all_to_all at bytes_per_pair 16384 gave a wrong answer: 1 of 16384 bytes from rank 0"
    try:
        with pytest.raises(RankError, match=message):
            measure_cases(World(0, 1, "cpu", ("host",), told.append), request)
    finally:
        dist.destroy_process_group()
    assert [report.measurement.size for report in told if isinstance(report, Step)] == [
        {"bytes_per_pair": 64},
        {"bytes_per_pair": 1024},
    ]


def test_an_exchange_that_never_ran_is_a_wrong_answer() -> None:
    world = World(0, 2, "cpu", ("host",) * 2, print)
    blocks = AllToAll().prepare({"bytes_per_pair": 64}, "uint8", world)
    assert "64 of 64 bytes from rank 0" in str(AllToAll().check(blocks, blocks.received, world))


@pytest.mark.parametrize("m", [1, 3, 64])
def test_a_product_a_little_off_or_never_computed_is_a_wrong_answer(m: int) -> None:
    world = World(0, 1, "cpu", ("host",), print)
    operands = Gemm().prepare({"m": m, "n": 8, "k": 256}, "fp32", world)
    assert "off by nan" in str(Gemm().check(operands, operands.c_mn, world))
    output = Gemm().run(operands)
    assert Gemm().check(operands, output, world) is None
    output[-1, 3] += 0.01
    assert "off by 0.01" in str(Gemm().check(operands, output, world))


def test_a_block_of_another_rank_is_a_wrong_answer() -> None:
    world = World(0, 3, "cpu", ("host",) * 3, print)
    blocks = [
        AllToAll().prepare({"bytes_per_pair": 300}, "uint8", World(rank, 3, "cpu", world.hosts, print))
        for rank in range(3)
    ]
    right = torch.cat([block.send[:300] for block in blocks])
    assert AllToAll().check(blocks[0], right, world) is None
    swapped = torch.cat([blocks[rank].send[:300] for rank in (0, 2, 1)])
    assert "from rank 1 differ" in str(AllToAll().check(blocks[0], swapped, world))
    shifted = right.roll(1)
    assert AllToAll().check(blocks[0], shifted, world) is not None
    other = torch.cat([block.send[300:600] for block in blocks])
    assert AllToAll().check(blocks[0], other, world) is not None


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 4, 512])
@pytest.mark.parametrize("case", [Gemm(), AllToAll()], ids=lambda case: case.name)
def test_grids_ascend_and_fit_into_memory(case: Case, num_ranks: int, quick: bool) -> None:
    world = World(0, num_ranks, "cpu", ("host",) * num_ranks, print)
    sizes = case.sizes(world, quick=quick)
    work = [case.work(size, max(2, num_ranks)) for size in sizes]
    assert len(set(work)) >= 4
    assert work == sorted(work)
    assert all(size.get("bytes_per_pair", 0) * num_ranks <= 2**26 for size in sizes)


def test_the_registry_names_each_case_by_itself() -> None:
    assert list(CASES) == ["gemm", "all_to_all"]
    assert all(case.name == name for name, case in CASES.items())


def test_hosts_make_a_cluster_only_when_even_and_consecutive() -> None:
    assert _cluster(["a", "a", "b", "b", "c", "c"]) == Cluster(3, 2)
    for hosts in (["a", "a", "b"], ["a", "b", "a", "b"]):
        with pytest.raises(UsageError, match="expected consecutive ranks"):
            _cluster(hosts)


def test_between_hosts_a_byte_that_crosses_costs_what_all_bytes_took() -> None:
    found = Fit(model=AlphaBeta(a_s=1e-5, b_s=2e-10), held_out=None)
    links = _links(Cluster(2, 4), found)
    assert set(links) == {"inter"}
    block = 1_000_000
    crossing = links["inter"].latency_s + links["inter"].s_per_byte * 4 * block
    assert crossing == pytest.approx(found.seconds(7 * block))
    assert _links(Cluster(2, 4), None) == {}


def test_an_all_to_all_that_does_not_grow_with_size_tells_of_no_bandwidth() -> None:
    flat = fit([1, 2, 3], [3.0, 2.0, 1.0])
    assert _links(Cluster(1, 4), flat) == {}


@pytest.mark.parametrize("device", ["tpu", ""])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match="expected auto, cpu or cuda"):
        measure(device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="no GPU"):
        measure(device="cuda")


def test_an_interrupt_keeps_what_was_measured_and_says_that_it_is_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, on_progress: Callable[[Start | Step], None], **__: object) -> None:
        hosts = ("host", "host")
        on_progress(Start(Environment.of(World(0, 2, "cpu", hosts, print)), hosts))
        for done, work in enumerate((10, 1000, 100_000), 1):
            one = Measurement.of({"bytes_per_pair": work}, work, [1e-6 + 1e-9 * work])
            on_progress(Step("all_to_all", "uint8", one, done, 4))
        raise KeyboardInterrupt

    monkeypatch.setattr("moeplan.profilers.measure.run_world", run)
    profile = measure(device="cpu")
    assert profile is not None
    assert not profile.complete
    assert profile.cluster.links["intra"].s_per_byte == pytest.approx(1e-9)
    assert len(profile.series["all_to_all/uint8@2/intra"].measurements) == 3


def test_an_interrupt_before_the_first_figure_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moeplan.profilers.measure.run_world", run)
    with pytest.raises(KeyboardInterrupt):
        measure(device="cpu")


SCRIPT = """
import sys
from moeplan.profilers.measure import measure
from moeplan.profilers.profile import save
if __name__ == "__main__":
    profile = measure(num_ranks=1, device="cpu", on_progress=lambda step: print("step", step.done, flush=True))
    save(profile, sys.argv[1])
"""


def test_ctrl_c_in_a_terminal_leaves_a_profile_of_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "profile.json")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "step 1\n"
    time.sleep(0.5)
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=30)
    assert errors == ""
    profile = load(tmp_path / "profile.json")
    assert not profile.complete
    assert profile.series["gemm/fp32"].measurements
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.json", "script.py"]
