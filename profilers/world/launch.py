"""A launch: the rank of this process in a world that torchrun or srun started, its host, and where rank 0 listens.

torchrun exports all of it. srun exports ranks and host names; where `MASTER_ADDR` or `MASTER_PORT` is missing, rank 0
is taken to be on the first host of the step (srun's block and cyclic distributions put it there), and to listen on a
port made of the job's and the step's number, so that two jobs on a host do not meet. Export both to say otherwise.

Ranks of a launched world meet and agree in the launcher's store.
"""

import datetime
import functools
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import MismatchError, RankError, UsageError
from .failures import in_words, unreachable

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FIRST_PORT, NUM_PORTS = 15_000, 17_000  # below the ports that Linux hands out by itself
JOIN_TIMEOUT_S = 300.0  # the nodes of a job start minutes apart
Terms = Mapping[str, str]


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
        The variables describe a launch, but not where rank 0 listens.
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


@functools.cache
def launched_store(launch: Launch) -> Any:
    """The store of the launcher; kept, because rank 0 may be its server.

    Raises
    ------
    RankError
        Rank 0 does not answer.
    """
    import torch.distributed as dist
    from torch.distributed import rendezvous  # type: ignore[attr-defined]

    os.environ.setdefault("MASTER_ADDR", launch.address)
    os.environ.setdefault("MASTER_PORT", str(launch.port))
    timeout = datetime.timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        store, _, _ = next(rendezvous("env://", launch.rank, launch.size, timeout=timeout))
    except dist.DistError as error:
        raise RankError(
            f"rank 0 does not answer at {launch.address}:{launch.port}, where this world should meet"
            f" (rank {launch.rank} waited {JOIN_TIMEOUT_S:g} s at most)"
        ) from error
    return store


def gathered(store: "Store", key: str, value: str, rank: int, size: int) -> tuple[str, ...]:
    """The value that each rank gives under `key`, by rank.

    Raises
    ------
    RankError
        Some do not come within the store's timeout; they are named.
    """
    keys = [f"{key}/{peer}" for peer in range(size)]
    try:
        store.set(f"{key}/{rank}", value)
        store.wait(keys)
        return tuple(store.get(name).decode() for name in keys)
    except RuntimeError as error:
        raise RankError(_absent(store, keys, rank)) from error


def check_agreement(store: "Store", terms: Terms, rank: int, size: int) -> None:
    """Return where every rank gives the same terms.

    Raises
    ------
    MismatchError
        Some differ from rank 0: on every rank the same message, with their numbers, the term and both values.
    """
    texts = gathered(store, "terms", json.dumps(dict(terms)), rank, size)
    first, *others = map(json.loads, texts)
    for peer, other in enumerate(others, 1):
        if other != first:
            name = next(name for name in {**first, **other} if first.get(name) != other.get(name))
            differing = [peer for peer, text in enumerate(texts) if text != texts[0]]
            raise MismatchError(
                f"{in_words(differing)} disagree{'s' * (len(differing) == 1)} with rank 0 about {name}: rank {peer} has"
                f" {other.get(name)}, rank 0 {first.get(name)}; start every rank with the same command and version"
            )


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
        # The first name of a Slurm host list: `gpu[007-012,20]-b,login` -> `gpu007-b`.
        master["MASTER_ADDR"] = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", hosts).split(",")[0]
    job, step = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", "0")
    if job.isdecimal() and step.isdecimal():
        master["MASTER_PORT"] = str(FIRST_PORT + (int(job) + 97 * int(step)) % NUM_PORTS)
    return master


def _absent(store: "Store", keys: Sequence[str], rank: int) -> str:
    """Ranks that did not join, when waiting for all failed."""
    try:
        absent = [peer for peer, name in enumerate(keys) if not store.check([name])]
    except RuntimeError:
        return unreachable(rank)
    return f"{in_words(absent)} did not join within {JOIN_TIMEOUT_S:g} s (noticed by rank {rank})"
