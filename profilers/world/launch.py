"""A launch: the rank of this process in a world that torchrun or srun started, its host, and where rank 0 listens.

torchrun exports all of it. srun exports ranks and host names; where `MASTER_ADDR` or `MASTER_PORT` is missing, rank 0
is taken to be on the first host of the step (srun's block and cyclic distributions put it there), and to listen on a
port made of the job's and the step's number, so that two jobs on a host do not meet. Export both to say otherwise.
"""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError

__all__ = ["Launch", "found_launch", "this_host"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FIRST_PORT, NUM_PORTS = 15_000, 17_000  # below the ports that Linux hands out by itself


@dataclass(frozen=True, slots=True)
class Launch:
    """The rank of this process, the size of its world, and the host and port of rank 0."""

    rank: int
    size: int
    address: str
    port: int


def found_launch() -> Launch | None:
    """The launch that environment variables describe; None where local ranks are to be started.

    Raises
    ------
    UsageError
        They describe a launch, but not where rank 0 listens.
    """
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank not in os.environ or size not in os.environ:
            continue
        if rank == "SLURM_PROCID" and os.environ[size] == "1":
            continue  # an interactive shell or a batch script, not one task of several
        return _launch(rank, size)
    return None


def this_host() -> str:
    """A name that no other host has: the host name and, on Linux, the number of its boot (containers share names)."""
    try:
        return f"{socket.gethostname()} {BOOT_ID.read_text().strip()}"
    except OSError:
        return socket.gethostname()


def _launch(rank: str, size: str) -> Launch:
    """The launch in two variables of the environment."""
    index, count = os.environ[rank], os.environ[size]
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UsageError(f"{rank}={index} and {size}={count}; expected 0 <= {rank} < {size}")
    step = _slurm_step() if rank == "SLURM_PROCID" else {}
    master = {name: os.environ.get(name) or step.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    address, port = master.values()
    if address is None or port is None:
        missing = " and ".join(name for name, value in master.items() if value is None)
        raise UsageError(
            f"{rank} is set but {missing} is not; export the address of rank 0 and a free port,"
            f" or unset {rank} to start local ranks"
        )
    if not (port.isdecimal() and 0 < int(port) < 65_536):
        raise UsageError(f"MASTER_PORT={port}; expected a port, 1 to 65535")
    return Launch(int(index), int(count), address, int(port))


def _slurm_step() -> dict[str, str]:
    """Address and port of rank 0, as far as Slurm's variables give them."""
    master = {}
    if hosts := os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST"):
        master["MASTER_ADDR"] = _first_host(hosts)
    job, step = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", "0")
    if job.isdecimal() and step.isdecimal():
        master["MASTER_PORT"] = str(FIRST_PORT + (int(job) + 97 * int(step)) % NUM_PORTS)
    return master


def _first_host(hosts: str) -> str:
    """The first name of a Slurm host list: `gpu[007-012,20]-b,login` -> `gpu007-b`."""
    first = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", hosts)
    return first.split(",")[0]
