"""A world: the ranks that a function runs on, joined by a process group."""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["TIMEOUT_S", "World", "patience"]

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class World:
    """One rank's view of the world it runs in: all ranks, or those of its node.

    Parameters
    ----------
    rank, size
        Of this world; in the world of a node they count the node's ranks only.
    device
        Where the rank computes: "cpu" or "cuda:i".
    hosts
        A name of each rank's host that no other host has, `[size]`.
    report
        Hands a picklable value to the caller's `on_progress`; it also counts as a sign of life.
    group
        The process group that joins it; None: `torch.distributed`'s default group.
    timeout_s
        The longest silence of a rank.
    """

    rank: int
    size: int
    device: str
    hosts: tuple[str, ...]
    report: Callable[[Any], None]
    group: "ProcessGroup | None" = None
    timeout_s: float = TIMEOUT_S

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


def patience(timeout_s: float) -> datetime.timedelta:
    """Half the silence allowed: peers of a hung rank give up first, and the rank that stays silent is the hung one."""
    return datetime.timedelta(seconds=timeout_s / 2)
