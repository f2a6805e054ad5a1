"""A world: ranks joined by a process group, and running a function on each of them."""

import contextlib
import datetime
import functools
import itertools
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MoeplanError, RankError, UsageError
from .launch import Launch, found_launch
from .ranks import Channel, Progress, lost_peers, run_ranks, where

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["Target", "World", "run_world"]

TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 300.0  # the nodes of a job start minutes apart
MAX_LOCAL_RANKS = 256
_joins = itertools.count()  # keys of one world never meet those of the next in a shared store


@dataclass(frozen=True, slots=True)
class World:
    """What one rank knows of the world it runs in; `torch.distributed`'s default group joins it.

    Parameters
    ----------
    device
        Where the rank computes: "cpu" or "cuda:i".
    hosts
        The host name of each rank, `[size]`.
    report
        Hands a picklable value to the caller's `on_progress`; it also counts as a sign of life.
    """

    rank: int
    size: int
    device: str
    hosts: tuple[str, ...]
    report: Progress


Target = Callable[[World, Any], Any]


def run_world(
    num_ranks: int | None,
    target: Target,
    payload: Any = None,
    *,
    device: str = "cpu",
    timeout_s: float = TIMEOUT_S,
    on_progress: Progress | None = None,
) -> list[Any] | None:
    """The results of `target(world, payload)` on every rank, by rank; None on ranks other than 0 of a launched world.

    Under torchrun or srun this process joins that world; otherwise `num_ranks` local processes are started.

    Parameters
    ----------
    num_ranks
        Ranks of the world; None takes the launched world as it is.
    target, payload
        A module-level function and its picklable argument.
    device
        "cpu" (gloo) or "cuda" (nccl, one GPU a rank, with gloo for tensors on the CPU).
    timeout_s
        The longest silence: seconds in which no rank reports or finishes.
    on_progress
        Receives what ranks pass to `world.report` (in a launched world: rank 0's only).

    Raises
    ------
    RankError
        A rank died, hung or failed; it is named, and every local process is ended first.
    MoeplanError
        The error of that class which a rank raised, its number in front.
    UsageError
        More ranks than GPUs, or than the launched world has.
    """
    launch = found_launch()
    if launch is None:
        local = _checked(num_ranks, device)
        with tempfile.TemporaryDirectory(prefix="moeplan-") as folder:
            entry = functools.partial(_local_rank, local, target, payload, device, timeout_s, f"{folder}/store")
            return run_ranks(local, entry, timeout_s=timeout_s, on_progress=on_progress)
    if num_ranks not in (None, launch.size):
        raise UsageError(f"{num_ranks} ranks asked for in a launched world of {launch.size}; leave the number out")
    try:
        return _run_launched(launch, target, payload, device, timeout_s, on_progress)
    except MoeplanError as error:
        raise type(error)(f"rank {launch.rank}: {error}") from error
    except Exception as error:
        if lost_peers(error):
            raise RankError(_absent(launch, timeout_s)) from error
        raise RankError(f"rank {launch.rank}: failed at {where(error)}: {type(error).__name__}: {error}") from error


def _checked(num_ranks: int | None, device: str) -> int:
    """The number of local ranks, if they can be started."""
    if num_ranks is None or not 1 <= num_ranks <= MAX_LOCAL_RANKS:
        raise UsageError(f"{num_ranks} local ranks; expected 1 to {MAX_LOCAL_RANKS}")
    if device == "cuda":
        import torch

        if num_ranks > torch.cuda.device_count():
            raise UsageError(f"{num_ranks} ranks on {torch.cuda.device_count()} GPUs; expected one GPU a rank")
    elif device != "cpu":
        raise UsageError(f"device {device!r}; expected cpu or cuda")
    return num_ranks


def _local_rank(
    size: int, target: Target, payload: Any, device: str, timeout_s: float, store_path: str, rank: int, channel: Channel
) -> None:
    """One local process: join, run, deliver."""
    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names of containers often do not resolve
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    store = FileStore(store_path, size)
    with _joined(store, rank, size, device, timeout_s, channel.report) as world:
        channel.greet()
        channel.deliver(target(world, payload))


def _run_launched(
    launch: Launch, target: Target, payload: Any, device: str, timeout_s: float, on_progress: Progress | None
) -> list[Any] | None:
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = PrefixStore(f"moeplan/{next(_joins)}", _environment_store(launch))
    report = on_progress if on_progress is not None and launch.rank == 0 else _ignore
    with _joined(store, launch.rank, launch.size, device, timeout_s, report) as world:
        results: list[Any] | None = [None] * launch.size if launch.rank == 0 else None
        dist.gather_object(target(world, payload), results)
        dist.barrier()
    return results


@functools.cache
def _environment_store(launch: Launch) -> Any:
    """The store of the launcher; kept, because rank 0 may be its server."""
    from torch.distributed import rendezvous  # type: ignore[attr-defined]

    store, _, _ = next(rendezvous("env://", launch.rank, launch.size, timeout=_seconds(JOIN_TIMEOUT_S)))
    return store


@contextlib.contextmanager
def _joined(store: "Store", rank: int, size: int, device: str, timeout_s: float, report: Progress) -> Iterator[World]:
    """The default process group while the block runs well; a failed rank leaves it to the end of its process."""
    import torch
    import torch.distributed as dist

    store.set_timeout(_seconds(JOIN_TIMEOUT_S))
    store.set(f"host/{rank}", socket.gethostname())
    hosts = tuple(store.get(f"host/{peer}").decode() for peer in range(size))
    index = hosts[:rank].count(hosts[rank])
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", index % torch.cuda.device_count())
        torch.cuda.set_device(place)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=size,
        # Half the silence allowed: peers of a hung rank then give up first, and the one that stays silent is it.
        timeout=_seconds(timeout_s / 2),
        device_id=None if device == "cpu" else place,
    )
    yield World(rank, size, str(place), hosts, report)
    dist.destroy_process_group()


def _absent(launch: Launch, timeout_s: float) -> str:
    """Which ranks of a launched world do not say that they are there, asked through its store."""
    try:
        store = _environment_store(launch)
        store.set(f"lost/{launch.rank}", "1")
        time.sleep(min(5.0, timeout_s / 4))
        absent = [peer for peer in range(launch.size) if not store.check([f"lost/{peer}"])]
    except RuntimeError:
        return f"rank {launch.rank} cannot reach rank 0, which keeps the store of this world"
    if not absent:
        return f"rank {launch.rank} lost the others, which are alive; the network between them failed"
    return f"rank {', '.join(map(str, absent))} did not answer within {timeout_s:g} s (noticed by rank {launch.rank})"


def _seconds(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


def _ignore(_value: Any) -> None:
    """Where progress goes that nobody asked for."""
