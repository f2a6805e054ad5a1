"""A world: the ranks, local or launched, that one function is called on, joined by a process group."""

import contextlib
import datetime
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import RankError, UsageError
from .failures import as_own_failure, leave_word, lost_peers, watchdog, why_lost
from .launch import JOIN_TIMEOUT_S, Launch, Terms, check_agreement, found_launch, gathered, launched_store, this_host
from .local_ranks import Channel, Progress, run_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

TIMEOUT_S = 60.0
MAX_LOCAL_RANKS = 256
_joins = itertools.count()  # keys of one world never meet those of the next in a shared store
Target = Callable[["World", Any], Any]


@dataclass(frozen=True, slots=True)
class World:
    """One rank's view of the world it runs in: all ranks, or those of its node."""

    #: rank, size: of this world; in the world of a node they count the node's ranks only
    rank: int
    size: int
    device: str  #: Where the rank computes: "cpu" or "cuda:i"
    hosts: tuple[str, ...]  #: A name of each rank's host that no other host has, `[size]`
    #: Hands a picklable value to the caller's `on_progress`; it also counts as a sign of life
    report: Callable[[Any], None]
    group: "ProcessGroup | None" = None  #: The process group that joins it; None: `torch.distributed`'s default group
    timeout_s: float = TIMEOUT_S  #: The longest silence of a rank

    @property
    def devices_per_node(self) -> int:
        """Ranks of each node; all where nodes differ in their numbers, or the ranks of one are not in a row."""
        group = self.hosts.count(self.hosts[0])
        in_a_row = [host for host in dict.fromkeys(self.hosts) for _ in range(group)]
        return group if in_a_row == [*self.hosts] else self.size

    def of_node(self) -> "World":
        """The world of the ranks on this rank's node; every rank calls it, since every node makes its group."""
        import torch.distributed as dist

        node = self
        for host in dict.fromkeys(self.hosts):
            ranks = [rank for rank in range(self.size) if self.hosts[rank] == host]
            group = dist.new_group(ranks, timeout=patience(self.timeout_s))
            if self.rank in ranks:
                index = ranks.index(self.rank)
                hosts = (host,) * len(ranks)
                node = World(index, len(ranks), self.device, hosts, self.report, group, self.timeout_s)
        return node


@dataclass(frozen=True, slots=True)
class _Run:
    """A function and where it runs; picklable."""

    target: Target
    payload: Any
    device: str
    timeout_s: float
    host_of: Callable[[int], str] | None


def patience(timeout_s: float) -> datetime.timedelta:
    """Half the silence allowed: peers of a hung rank give up first, and the rank that stays silent is the hung one."""
    return datetime.timedelta(seconds=timeout_s / 2)


def run_world(
    num_ranks: int | None,
    target: Target,
    payload: Any = None,
    *,
    device: str = "cpu",
    timeout_s: float = TIMEOUT_S,
    on_progress: Progress | None = None,
    terms: Callable[[World, Any], Terms] | None = None,
    host_of: Callable[[int], str] | None = None,
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
    terms
        `terms(world, payload)` gives what all ranks of a launched world must agree on, before its group is joined.
    host_of
        The name to use for a rank's host. Tests put the ranks of one machine on several "nodes" with it.

    Raises
    ------
    RankError
        A rank died, hung or failed; it is named, and every local process is ended first.
    MismatchError
        The ranks of a launched world disagree about the terms; the same message on every rank.
    MoeplanError
        The error of that class which a rank raised, its number in front.
    UsageError
        More ranks than GPUs, or than the launched world has.
    """
    launch, run = found_launch(), _Run(target, payload, device, timeout_s, host_of)
    if launch is None:
        local = _checked(num_ranks, device)
        with tempfile.TemporaryDirectory(prefix="moeplan-") as folder:
            entry = functools.partial(_local_rank, run, local, f"{folder}/store")
            return run_ranks(local, entry, timeout_s=timeout_s, on_progress=on_progress)
    if num_ranks not in (None, launch.size):
        raise UsageError(f"{num_ranks} ranks asked for in a launched world of {launch.size}; leave the number out")
    return _run_launched(run, launch, on_progress, terms)


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


def _local_rank(run: _Run, size: int, store_path: str, rank: int, channel: Channel) -> None:
    """One local process: join, run, deliver."""
    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names of containers often do not resolve
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    store = FileStore(store_path, size)
    world = _met(run, store, rank, size, channel.report)
    with _joined(store, world):
        channel.greet()
        channel.deliver(run.target(world, run.payload))


def _run_launched(
    run: _Run, launch: Launch, on_progress: Progress | None, terms: Callable[[World, Any], Terms] | None
) -> list[Any] | None:
    """Meet, agree, join and run, as every launched process does; all ranks learn of a failure."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = PrefixStore(f"moeplan/{next(_joins)}", launched_store(launch))
    report = on_progress if on_progress is not None and launch.rank == 0 else lambda _: None
    with watchdog(store, launch.rank, launch.size, run.timeout_s):
        world = _met(run, store, launch.rank, launch.size, report)
        if terms is not None:
            check_agreement(store, terms(world, run.payload), launch.rank, launch.size)
        store.set_timeout(patience(run.timeout_s))
        try:
            with _joined(store, world):
                return _gathered_results(world, run.target(world, run.payload))
        except Exception as error:
            if lost_peers(error):
                raise RankError(why_lost(store, launch.rank, launch.size, run.timeout_s, error)) from error
            failure = as_own_failure(error)
            leave_word(store, launch.rank, failure)
            raise type(failure)(f"rank {launch.rank}: {failure}") from error


def _gathered_results(world: World, result: Any) -> list[Any] | None:
    import torch.distributed as dist

    results: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object(result, results)
    dist.barrier()
    return results


def _met(run: _Run, store: "Store", rank: int, size: int, report: Progress) -> World:
    """The world as its ranks describe it in the store: the host of each, and hence the device of this one."""
    store.set_timeout(datetime.timedelta(seconds=JOIN_TIMEOUT_S))
    hosts = gathered(store, "host", run.host_of(rank) if run.host_of else this_host(), rank, size)
    device = run.device
    if device == "cuda":
        import torch

        device = f"cuda:{hosts[:rank].count(hosts[rank]) % torch.cuda.device_count()}"
    return World(rank, size, device, hosts, report, timeout_s=run.timeout_s)


@contextlib.contextmanager
def _joined(store: "Store", world: World) -> Iterator[None]:
    """The default process group while the block runs well; a failed rank leaves it to the end of its process."""
    import torch
    import torch.distributed as dist

    cuda = world.device != "cpu"
    if cuda:
        torch.cuda.set_device(world.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=patience(world.timeout_s),
        device_id=torch.device(world.device) if cuda else None,
    )
    yield
    dist.destroy_process_group()
