"""Ranks as processes: every way in which one of them can fail, without torch (so they start at once)."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError, MoeplanError, RankError, UsageError
from moeplan.profilers.world import World, run_world
from moeplan.profilers.world.local_ranks import Channel, run_ranks
from tests.builders import known
from tests.profilers.small_cases import by_halves
from tests.profilers.world.test_launch import started


def answers(rank: int, channel: Channel) -> None:
    channel.greet()
    channel.report(f"working {rank}")
    channel.deliver(rank * 10)


def acting(acts: dict[int, Callable[[], object]], others: Callable[[], object], rank: int, channel: Channel) -> None:
    channel.greet()
    acts.get(rank, others)()
    channel.deliver(rank)


def fails(who: int, what: Callable[..., object], *args: object, others: Exception | None = None) -> Any:
    """An entry of which one rank does something else than to answer, while the others answer or raise an error."""
    return partial(acting, {who: partial(what, *args)}, partial(raising, others) if others else bool)


def killing(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def raising(error: Exception) -> None:
    raise error


def dying_late() -> None:
    time.sleep(0.5)
    killing(signal.SIGSEGV)


GLOO = "[gloo/transport/tcp/pair.cc:1]"
TIMED_OUT = RuntimeError(f"{GLOO} Timed out waiting 500ms for recv operation to complete")
CLOSED = RuntimeError(f"{GLOO} Connection closed by peer")


def talks_and_hangs(rank: int, channel: Channel) -> None:
    channel.greet()
    channel.report(f"up {rank}")
    time.sleep(600)


def slow_but_talking(rank: int, channel: Channel) -> None:
    channel.greet()
    for _ in range(6):
        time.sleep(0.25)
        if rank == 0:
            channel.report("alive")
    channel.deliver(rank)


def test_results_come_back_by_rank_and_reports_on_the_way() -> None:
    heard: list[str] = []
    assert run_ranks(3, answers, timeout_s=30, on_progress=heard.append) == [0, 10, 20]
    assert sorted(heard) == ["working 0", "working 1", "working 2"]


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (fails(2, killing, signal.SIGKILL), RankError, r"^rank 2 died \(SIGKILL\)"),
        (fails(1, os._exit, 3), RankError, r"^rank 1 died \(exit code 3\)"),
        (fails(2, dying_late, others=CLOSED), RankError, r"^rank 2 died \(SIGSEGV\)"),
        (fails(1, time.sleep, 600), RankError, r"^rank 1 did not answer within 1 s"),
        (fails(1, time.sleep, 600, others=TIMED_OUT), RankError, r"^rank 1 did not answer within 1 s"),
        (fails(3, bool, others=CLOSED), RankError, r"^rank 0 lost the others, which are alive: .*Connection closed"),
        (fails(1, raising, InputError("trace/: no tokens")), InputError, r"^rank 1: trace/: no tokens$"),
        (
            fails(1, raising, TypeError("no such thing")),
            RankError,
            r"^rank 1: failed at .*test_ranks\.py:\d+: TypeError: no such thing$",
        ),
    ],
)
def test_a_rank_that_fails_ends_the_run_by_its_name(entry: Any, error: type[MoeplanError], message: str) -> None:
    before = set(_descendants(os.getpid()))  # interpreters that other tests of this worker keep
    with pytest.raises(error, match=message) as caught:
        run_ranks(3, entry, timeout_s=1)
    assert "\n" not in str(caught.value)
    assert set(_descendants(os.getpid())) <= before


def test_a_slow_run_goes_on_as_long_as_one_rank_reports() -> None:
    assert run_ranks(2, slow_but_talking, timeout_s=1.0) == [0, 1]


def environment_of(_rank: int, channel: Channel) -> None:
    channel.greet()
    has_torch = "torch.distributed" in sys.modules
    channel.deliver((os.environ.get("MOEPLAN_LATER"), os.getcwd(), sorted(os.sched_getaffinity(0)), has_torch))


def test_a_rank_has_environment_folder_and_cores_of_its_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    monkeypatch.setenv("MOEPLAN_LATER", "once")
    assert run_ranks(1, environment_of, timeout_s=30) == [("once", os.getcwd(), sorted(cores), True)]
    monkeypatch.delenv("MOEPLAN_LATER")
    monkeypatch.chdir(tmp_path)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert run_ranks(1, environment_of, timeout_s=30) == [(None, str(tmp_path), [min(cores)], True)]
    finally:
        os.sched_setaffinity(0, cores)


def kills_its_nursery(rank: int, channel: Channel) -> None:
    channel.greet()
    if rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def test_what_started_the_ranks_may_die_and_takes_them_along() -> None:
    before = set(_descendants(os.getpid()))
    with pytest.raises(RankError, match=r"^rank \d died \(SIGKILL\)"):
        run_ranks(3, kills_its_nursery, timeout_s=60)
    assert set(_descendants(os.getpid())) <= before


def dies_while_it_tells(rank: int, channel: Channel) -> None:
    channel.greet()
    if rank == 0:
        time.sleep(0.3)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        os.write(channel.pipe.fileno(), (2**20).to_bytes(4, "big") + bytes(1000))  # the beginning of a message
    time.sleep(600)


def test_a_rank_that_dies_in_the_middle_of_its_result_is_named() -> None:
    with pytest.raises(RankError, match=r"^rank 0 died \(SIGKILL\)"):
        run_ranks(2, dies_while_it_tells, timeout_s=60)


def test_an_entry_that_a_rank_cannot_import_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "only_here", sys.modules[__name__])
    monkeypatch.setattr(answers, "__module__", "only_here")
    with pytest.raises(RankError, match="ModuleNotFoundError"):
        run_ranks(1, answers, timeout_s=5)


SCRIPT = """
import sys
from moeplan.profilers.world.local_ranks import run_ranks
from tests.profilers.world.test_ranks import talks_and_hangs
if __name__ == "__main__":
    try:
        run_ranks(3, talks_and_hangs, timeout_s=600, on_progress=lambda said: print(said, flush=True))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_parent(tmp_path: Path, how: signal.Signals) -> None:
    parent = started(tmp_path, SCRIPT)
    assert sorted(known(parent.stdout).readline() for _ in range(3)) == ["up 0\n", "up 1\n", "up 2\n"]
    children = _descendants(parent.pid)
    assert len(children) == 4  # the ranks, and what started them
    os.killpg(parent.pid, signal.SIGINT) if how is signal.SIGINT else parent.kill()
    output, errors = parent.communicate(timeout=20)
    end = time.monotonic() + 20
    while any(map(_alive, children)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(_alive, children))
    assert "Traceback" not in errors
    assert ("interrupted" in output) == (how is signal.SIGINT)


def _descendants(pid: int) -> list[int]:
    """Processes that `pid` started, or that those started, but for the tracker that multiprocessing keeps."""
    children = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            command = (status.parent / "cmdline").read_text()
        except OSError:
            continue
        if parent == pid and "resource_tracker" not in command:
            children.append(int(status.parent.name))
    return children + [one for child in children for one in _descendants(child)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def adds(world: World, payload: float) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([payload * world.rank])
    dist.all_reduce(total)
    world.report(world.rank)
    place = world.size, len(world.hosts), len(set(world.hosts)), world.device
    return {"rank": world.rank, "total": total, "place": place, "threads": torch.get_num_threads()}


def adds_on_its_node(world: World, _payload: None) -> tuple[int, int, float]:
    import torch
    import torch.distributed as dist

    node = world.of_node()
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total, group=node.group)
    return node.rank, node.size, total.item()


def test_every_rank_runs_in_one_group_and_its_tensors_come_back() -> None:
    heard: list[int] = []
    results = known(run_world(2, adds, 2.0, on_progress=heard.append))
    assert [result["rank"] for result in results] == [0, 1]
    assert [result["total"].item() for result in results] == [2.0] * 2
    assert [result["place"] for result in results] == [(2, 2, 1, "cpu")] * 2
    assert all(result["threads"] * 2 <= max(2, len(os.sched_getaffinity(0))) for result in results)
    assert sorted(heard) == [0, 1]


def test_the_ranks_of_a_node_are_a_world_of_their_own() -> None:
    found = run_world(4, adds_on_its_node, host_of=by_halves)
    assert found == [(0, 2, 1.0), (1, 2, 1.0), (0, 2, 5.0), (1, 2, 5.0)]


@pytest.mark.parametrize(
    ("hosts", "expected"), [("aabb", 2), ("abcd", 1), ("aaaa", 4), ("abab", 4), ("aaab", 4), ("aabbc", 5), ("aabba", 5)]
)
def test_nodes_have_as_many_ranks_each_or_are_taken_for_one(hosts: str, expected: int) -> None:
    assert World(0, len(hosts), "cpu", (*hosts,), print).devices_per_node == expected


def test_an_impossible_number_of_local_ranks_or_device_is_refused() -> None:
    for num_ranks in (None, 0, -1, 257):
        with pytest.raises(UsageError, match="expected 1 to 256"):
            run_world(num_ranks, adds)
    with pytest.raises(UsageError, match="expected cpu or cuda"):
        run_world(1, adds, device="tpu")


def test_a_launched_world_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="4 ranks asked for in a launched world of 2"):
        run_world(4, adds)
