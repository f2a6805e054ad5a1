"""Loops whose ranks are killed, stopped, fail or end early: the others end in time and name them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.builders import known
from tests.profilers.world.test_launch import environment
from tests.runtime.engine.watch_cases import FAULTY_STEP, STEPS, case_of
from tests.warm import Start, warm

SCRIPT = Path(__file__).with_name("watch_cases.py")
TIMEOUT_S = 6.0
START_S = 180.0  # the longest that a loop may take, not what it does
Loop = Callable[..., list["Ended"]]


@dataclass(frozen=True)
class Ended:
    """How a rank ended, and when, in seconds of `time.time`."""

    code: int
    out: str
    err: str
    at: float


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    with warm("tests.runtime.engine.watch_cases", "main", env=environment()) as start:
        yield start


@pytest.fixture
def loop(start: Start, tmp_path: Path) -> Loop:
    """How each rank of a loop ended; a stopped one is killed after the others."""

    def run(fault: str, unlucky: int = -1, *, num_ranks: int = 3, store: str = "env://") -> list[Ended]:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = str(probe.getsockname()[1])
        env = environment(MASTER_ADDR="localhost", MASTER_PORT=port, WORLD_SIZE=str(num_ranks), TEST_STORE=store)
        told = start([fault, str(unlucky), str(TIMEOUT_S)], tmp_path, env).stdout
        ends = {rank: (code, at) for rank, code, at in map(json.loads, told.splitlines())}
        texts = {rank: [(tmp_path / f"{name}-{rank}").read_text() for name in ("out", "err")] for rank in ends}
        return [Ended(code, out=texts[rank][0], err=texts[rank][1], at=at) for rank, (code, at) in sorted(ends.items())]

    return run


def lines(text: str) -> list[str]:
    """Without what gloo writes by itself."""
    return [line for line in text.splitlines() if not line.startswith("[")]


@pytest.mark.parametrize(
    ("fault", "unlucky", "told"),
    [
        ("killed", 1, "rank 1 died or stopped (noticed by rank N)"),
        ("killed", 0, "rank N cannot reach rank 0, which keeps the store of this world"),
        ("stopped", 0, f"rank 0 did not answer within {TIMEOUT_S:g} s (noticed by rank N)"),
        ("ends", 1, "rank 1 ended while others need it (noticed by rank N); check that all take as many steps"),
        ("ends", 0, "rank 0, which kept the store, ended before others; check that all take as many steps (N)"),
        ("raises", 1, f"rank 1: failed at {SCRIPT}:N: ValueError: a bad batch"),
        ("raises beside a slow rank", 1, f"rank 1: failed at {SCRIPT}:N: ValueError: a bad batch"),
    ],
)
def test_a_rank_in_grief_ends_others_with_a_line_that_names_it(loop: Loop, fault: str, unlucky: int, told: str) -> None:
    assert_named(loop(fault, unlucky), fault, unlucky, told)


def assert_named(ranks: list[Ended], fault: str, unlucky: int, told: str) -> None:
    """Check that the others end soon after the fault, with the line that is told."""
    struck = float(ranks[unlucky].out.split("struck ")[1].split()[0])
    for ended in ranks[:unlucky] + ranks[unlucky + 1 :]:
        assert ended.code == 6, ended
        (line,) = lines(ended.err)
        assert (
            re.sub(r"(?<=by rank )\d|(?<=rank )\d(?= cannot)|(?<=py:)\d+|(?<=steps \().+(?=\))", "N", line)
            == f"moeplan: {told}"
        ), ended
        assert ended.at - struck < 2 * TIMEOUT_S, ended
    assert ranks[unlucky].code == {"killed": -9, "stopped": -9, "ends": 0, "raises": 1}[fault.split()[0]]
    assert ("ValueError: a bad batch" in ranks[unlucky].err) == fault.startswith("raises")
    assert ranks[unlucky].out.endswith("flushed\n") == fault.startswith("raises")
    assert "moeplan: " not in ranks[unlucky].err


@pytest.mark.parametrize("when", ["in a move", "in a move under way"])
def test_after_a_rank_was_killed_in_a_move_training_goes_on_from_the_last_checkpoint_as_it_would_have(
    when: str, loop: Loop
) -> None:
    losses = one_process()
    killed = loop(f"killed {when}", 1)
    assert_named(killed, f"killed {when}", 1, "rank 1 died or stopped (noticed by rank N)")
    for before, again, expected in zip(killed, loop(f"resumed {when}"), losses, strict=True):
        assert [*map(float, before.out.split()[:FAULTY_STEP])] == pytest.approx(expected[:FAULTY_STEP], rel=1e-9)
        assert [*map(float, again.out.split())] == pytest.approx(expected[FAULTY_STEP:], rel=1e-9)


def one_process() -> list[list[float]]:
    """Losses of the whole model by rank and step."""
    case, losses = case_of(3), list[list[float]]()
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(STEPS):
        loss = model(case.tokens(number)).square().sum((1, 2))
        loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.tolist())
    return [list(column) for column in zip(*losses, strict=True)]


def test_a_world_that_met_in_a_file_is_watched_as_well(tmp_path: Path, loop: Loop) -> None:
    ranks = loop("killed", 0, store=f"file://{tmp_path}/store")
    assert [lines(ended.err)[-1].split(" (")[0] for ended in ranks[1:]] == ["moeplan: rank 0 died or stopped"] * 2


def test_ranks_of_another_group_end_well_where_one_stops(loop: Loop) -> None:
    ranks = loop("stopped in halves", 1, num_ranks=4)
    assert [ended.code for ended in ranks] == [6, -9, 0, 0], ranks
    assert lines(ranks[0].err) == ["moeplan: rank 1 died or stopped (noticed by rank 0)"]


def test_a_script_may_catch_the_loss_of_a_rank(loop: Loop) -> None:
    ranks = loop("caught", 1)
    assert [ended.out.split(" (")[0] for ended in (ranks[0], ranks[2])] == ["caught rank 1 died or stopped"] * 2


def test_ranks_that_end_one_after_the_other_write_nothing_and_leave_no_thread(loop: Loop) -> None:
    ranks = loop("none, ended unevenly, in halves", num_ranks=4)
    assert [(ended.code, ended.out, lines(ended.err)) for ended in ranks] == [(0, "done\n", [])] * 4


def test_a_script_that_ends_while_the_watch_leaves_waits_for_its_threads(loop: Loop) -> None:
    ranks = loop("none, ended amid leaving", num_ranks=2)
    assert [(ended.code, ended.out, lines(ended.err)) for ended in ranks] == [(0, "['MainThread']\n", [])] * 2


def test_under_torchrun_which_keeps_waiting_for_a_stopped_rank_the_others_name_it_and_end() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    pipe, errors = subprocess.PIPE, ""
    command = [*launch, str(SCRIPT), "stopped", "0", str(TIMEOUT_S)]
    with subprocess.Popen(command, text=True, env=environment(), stdout=pipe, stderr=pipe) as launcher:
        pid = int(known(launcher.stdout).readline().split()[0])
        try:
            for line in iter(known(launcher.stderr).readline, ""):
                errors += line
                if "moeplan: " in line:
                    break
        finally:
            os.kill(pid, signal.SIGKILL)  # torchrun's ranks are groups of their own
        errors += launcher.communicate(timeout=START_S)[1]
    assert launcher.returncode == 1
    assert "moeplan: rank 0 died or stopped (noticed by rank " in errors
    assert "exitcode  : 6" in errors
