"""Training on a few ranks, of which one comes to grief between a forward and its backward; run as a script.

Arguments: the fault, the rank that it hits, the timeout in seconds. It is one rank where the environment says which;
else it forks `WORLD_SIZE` of them, each writing to files of its own in the current folder, and tells how they end.
"""

import atexit
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # optimizers load it
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from moeplan.errors import RankError
from moeplan.profilers.world.failures import _Watchdog
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import PlacementDecision
from moeplan.runtime.engine.route import Route
from moeplan.runtime.engine.watch import naming_lost_ranks, watch
from moeplan.runtime.rebalancing import tables_of
from moeplan.runtime.whole import full_optimizer_state, full_state_dict, keep_held
from moeplan.solvers.arrays import Ints
from moeplan.solvers.flexmoe import Seen
from tests.runtime.plans import COSTS, eager, made_plan
from tests.runtime.rank_cases import Case

STEPS, FAULTY_STEP = 6, 3


def main() -> None:
    """Be what the arguments and the environment say."""
    fault, unlucky, timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if "RANK" in os.environ or fork(fault, unlucky):
        try:
            train(fault, unlucky, timeout_s)
        except RankError as error:
            print(f"caught {error}")
            raise


def train(fault: str, unlucky: int, timeout_s: float) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", os.environ.get("TEST_STORE", "env://"), rank=rank, world_size=size)
    halves = [dist.new_group([0, 1]), dist.new_group(list(range(2, size)))] if "in halves" in fault else [None]
    if "ended amid" in fault:
        end_while_the_watch_leaves()
        return
    watch(timeout_s=timeout_s)
    if "in a move" in fault:
        moved(fault, rank, unlucky)
        return
    loop, tokens = made(halves[rank // 2 % len(halves)])
    for number in range(STEPS):
        with naming_lost_ranks() if fault == "caught" else contextlib.nullcontext():
            logits = loop(tokens)
            if (number, rank) == (FAULTY_STEP, unlucky):
                strike(fault)
            elif number == FAULTY_STEP and rank == 2 and "beside a slow rank" in fault:
                ctypes.PyDLL(None).sleep(4)  # holds all threads of this process
            logits.sum().backward()
    time.sleep(2.0 * rank if "unevenly" in fault else 0.0)
    dist.destroy_process_group()
    wait_for_the_end_of_threads()
    print("done")


def made(group: dist.ProcessGroup | None) -> tuple[DistributedDataParallel, Tensor]:
    """A model on the ranks of a group, and the samples of this rank."""
    size = dist.get_world_size(group)
    case = case_of(size)
    model = parallelize(case.model(), case.plan(), group)
    return DistributedDataParallel(model, process_group=group), case.tokens()[:1]


def case_of(size: int, **more: Any) -> Case:
    """A model on so many ranks, with a sample for each."""
    return Case("standard", (4,) * size, (1,) * size, num_layers=2, gradients=True, **more)


class ToTheNext(NamedTuple):
    """A rule by which every expert moves to the next rank."""

    window: int = 1

    def __call__(self, seen: Seen) -> Ints:
        return np.roll(seen.table, 1, axis=0)


def moved(fault: str, rank: int, unlucky: int) -> None:
    """Train while every expert moves to the next rank after each step, and save every step but the faulty one's.

    Of "killed in a move" the fault strikes when rows leave; "under way", which a policy decides, while they travel
    beside a forward. "resumed in a move" goes on from what was saved.
    """
    case = case_of(dist.get_world_size(), rule="quota")
    start = tables_of(case.placement())
    plan = made_plan(case.plan().cluster, case.plan().model, rebalancing=eager(PlacementDecision.of(case.placement())))
    schedule = {step: np.roll(start, step, axis=1) for step in range(STEPS + 1)}
    with mock.patch("moeplan.runtime.rebalancer.policy_of", return_value=(ToTheNext(), COSTS)):
        spread = parallelize(case.model(), plan, schedule=None if "under way" in fault else schedule)
    loop, optimizer, done = DistributedDataParallel(spread), torch.optim.AdamW(spread.parameters()), 0
    assert spread.rebalancing is not None
    if fault.startswith("resumed"):
        saved = torch.load("checkpoint.pt", weights_only=True)
        spread.rebalancing.load_state_dict(saved["rebalancing"])
        spread.model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        keep_held(spread, optimizer)
        done = spread.rebalancing.step
    for number in range(done, STEPS):
        loss = loop(case.tokens(number)[rank : rank + 1]).square().sum()
        struck = number == FAULTY_STEP and rank == unlucky
        if struck and "under way" in fault:
            assert spread.rebalancing.state_dict()["coming"]
            strike(fault)
        loss.backward()
        with mock.patch.object(Route, "start", side_effect=lambda *_: strike(fault)) if struck else mock.MagicMock():
            optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), flush=True)  # all that a rank writes where no fault strikes
        state = {"model": full_state_dict(loop), "optimizer": full_optimizer_state(loop, optimizer)}
        if rank == 0:
            torch.save(state | {"rebalancing": spread.rebalancing.state_dict()}, "checkpoint.pt")


def strike(fault: str) -> None:
    print(os.getpid(), "struck", time.time(), flush=True)
    if fault.startswith("killed") or fault == "caught":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.startswith("stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.startswith("raises"):
        atexit.register(flush_slowly)
        raise ValueError("a bad batch")
    elif fault == "ends":
        sys.exit()


def flush_slowly() -> None:
    """As loggers do at the end of a script."""
    time.sleep(4)
    print("flushed")


def end_while_the_watch_leaves() -> None:
    """End the script while the watch's own thread, which saw the end of the process group, waits for another of its."""
    look = _Watchdog.look

    def slow(dog: _Watchdog) -> None:
        look(dog)
        time.sleep(0.5)

    atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # after the watch's
    with mock.patch.object(_Watchdog, "look", slow):
        of_process = watch()
    dist.destroy_process_group()
    while of_process.goes_on or not of_process._left.is_set():
        time.sleep(0.01)


def wait_for_the_end_of_threads() -> None:
    """The watch's; autograd's are not Python's."""
    end = time.monotonic() + 10
    while threading.active_count() > 1:
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.1)


def fork(fault: str, unlucky: int) -> bool:
    """Become the ranks, True in each; a stopped one is killed after the others."""
    ranks: dict[int, int] = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        if not (pid := os.fork()):
            os.environ["RANK"] = str(rank)
            for name, stream in (("out", 1), ("err", 2)):
                os.dup2(os.open(f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            return True
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        print(json.dumps([ranks.pop(pid), os.waitstatus_to_exitcode(status), time.time()]), flush=True)
        if fault.startswith("stopped") and [*ranks.values()] == [unlucky]:
            os.kill(next(iter(ranks)), signal.SIGKILL)
    return False


if __name__ == "__main__":
    main()
