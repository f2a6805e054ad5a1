"""Launched ranks: what they run, and ranks forked as srun starts them from an interpreter that has imported torch."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from moeplan.errors import MoeplanError, UsageError
from moeplan.profilers.world import World, run_world

TIMEOUT_S = 4.0
LIMIT_S = 90


def adds(world: World, _payload: str) -> float:
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    return total.item()


def fails(rank: int, how: Callable[[], object]) -> Callable[[World, str], None]:
    """A target in which one rank fails and the others wait for it."""

    def target(world: World, _payload: str) -> None:
        if world.rank == rank:
            how()
        dist.barrier()

    return target


def refuses() -> None:
    raise UsageError("this rank cannot")


TARGETS: dict[str, Callable[[World, str], object]] = {
    "adds": adds,
    "disagrees": adds,
    "disagrees late": adds,
    "hangs": fails(1, lambda: time.sleep(600)),
    "refuses": fails(1, refuses),
    "dies": fails(2, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "stops": fails(0, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
}


def terms(world: World, payload: str) -> dict[str, str]:
    odd = payload.startswith("disagrees") and world.rank == 1
    if payload == "disagrees late" and world.rank == 2:
        ctypes.PyDLL(None).sleep(2)  # holds all threads of this process
    return {"version": "1", "quick": str(odd)}


def run(*names: str) -> None:
    """Run targets in the launched world of this process and say how they ended."""
    try:
        for name in names:
            results = run_world(None, TARGETS[name], name, timeout_s=TIMEOUT_S, terms=terms)
            os.write(1, f"result {results}\n".encode())  # one write: lines of ranks must not mix
    except MoeplanError as error:
        os.write(1, f"error {error}\n".encode())
        os._exit(error.exit_code)  # at once: the slow end of an interpreter would give others time


def main() -> None:
    """Fork the ranks of `launched.py RANKS STOPPED TARGET...`, and print exit code and output of each as JSON."""
    num_ranks, stopped, *names = sys.argv[1:]
    port = free_port()
    with TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(int(num_ranks))]
        ranks = [forked(rank, output, port, int(num_ranks), names) for rank, output in enumerate(outputs)]
        codes: dict[int, int] = {}
        for rank in sorted(range(len(ranks)), key=lambda rank: str(rank) == stopped):  # the stopped one when all ended
            if str(rank) == stopped:
                os.kill(ranks[rank], signal.SIGKILL)
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(ranks[rank], 0)[1])
        print(json.dumps([[codes[rank], output.read_text()] for rank, output in enumerate(outputs)]))


def forked(rank: int, output: Path, port: int, num_ranks: int, names: list[str]) -> int:
    """The process of a rank, with the variables that srun gives it."""
    if pid := os.fork():
        return pid
    signal.alarm(LIMIT_S)
    stream = os.open(output, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(stream, number)
    os.environ |= {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(num_ranks)}
    os.environ |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(port - 15_000)}
    run(*names)
    os._exit(0)


def free_port() -> int:
    """A free port among those that launches choose from."""
    while True:
        port = 15_000 + int.from_bytes(os.urandom(2)) % 17_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port
