"""The exchange of rows between all ranks: called by `runtime`, measured by the case `routed_exchange`.

Legend: P ranks of the group; n rows that this rank sends; m that it receives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

TAG = 0x6D6F  # of messages between ranks that may have others of their own


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-to-all of rows under way."""

    works: "Sequence[Work | None]"  #: None: this rank is not of the group

    @classmethod
    def start(
        cls,
        received: "Tensor",
        sent: "Tensor",
        into: Sequence[int],
        out: Sequence[int],
        group: "ProcessGroup | None" = None,
    ) -> Self:
        """Send contiguous rows, which autograd does not follow; a collective call that does not wait.

        Parameters
        ----------
        received, sent
            `[m, ...]` and `[n, ...]`, by rank. Neither is touched by others until `wait` returns.
        into, out
            Rows from each rank and to each, `[P]`.

        Notes
        -----
        On the CPU all receives are posted before anything is sent. In gloo a sender begins once its peer has told it,
        on the connection of the two, that it receives. gloo's own all-to-all tells some peers so behind what it sends
        them: these two take turns instead of sending at once. An even exchange then takes up to 1.25 times as long.
        """
        import torch
        import torch.distributed as dist

        if received.device.type != "cpu":
            return cls([dist.all_to_all_single(received, sent, into, out, group, async_op=True)])
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        with torch.no_grad():
            from_P = torch.split(received, [*into])
            to_P = torch.split(sent, [*out])
            from_P[rank].copy_(to_P[rank])
        peers = [(rank + step) % size for step in range(1, size)]
        works = [dist.irecv(from_P[one], group=group, group_src=one, tag=TAG) for one in peers if from_P[one].numel()]
        works += [dist.isend(to_P[one], group=group, group_dst=one, tag=TAG) for one in peers if to_P[one].numel()]
        return cls(works)

    def wait(self) -> None:
        """Wait until what comes has arrived and what goes has left."""
        for work in filter(None, self.works):
            work.wait()
