"""The exchange of rows between all ranks: called by `runtime`, measured by the case `routed_exchange`.

Legend: P ranks of the group; n rows that this rank sends; m that it receives.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary, finalize

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

TAGS = range(0x6D6F0000, 0x6D700000)  # of messages, apart from those that ranks may have besides


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-to-all of rows under way."""

    work: "Work | Future[None]"

    @classmethod
    def start(
        cls,
        arrived: "Tensor",
        rows: "Tensor",
        received: Sequence[int],
        sent: Sequence[int],
        group: "ProcessGroup | None" = None,
    ) -> Self:
        """Send contiguous rows, which autograd does not follow; a collective call that does not wait.

        Parameters
        ----------
        arrived, rows
            `[m, ...]` to be written, and `[n, ...]`, by rank. Both are left alone until `wait` returns.
        received, sent
            Rows from each rank and to each, `[P]`.

        Notes
        -----
        On the CPU all receives are posted before anything is sent. A gloo sender waits until its peer has announced the
        receive. gloo's own all-to-all queues some announcements behind its own data, so that such pairs send one after
        the other: an even exchange takes up to 1.2 times as long. A thread makes one exchange after another, so that
        the first chunk of a layer has arrived before the second is sent.
        """
        import torch
        import torch.distributed as dist

        if arrived.device.type != "cpu":
            return cls(dist.all_to_all_single(arrived, rows, received, sent, group, async_op=True))
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        with torch.no_grad():
            from_P, to_P = torch.split(arrived, [*received]), torch.split(rows, [*sent])
        sender = _Sender.of(group or dist.group.WORLD)
        tag, peers = next(sender.tags), [(rank + step) % size for step in range(1, size)]
        works = [dist.irecv(from_P[one], group=group, group_src=one, tag=tag) for one in peers if received[one]]

        def send() -> None:
            gone = [dist.isend(to_P[one], group=group, group_dst=one, tag=tag) for one in peers if sent[one]]
            with torch.inference_mode():  # as either may be of one
                from_P[rank].copy_(to_P[rank])
            for work in filter(None, (*works, *gone)):
                work.wait()

        return cls(sender.submit(send))

    def wait(self) -> None:
        """Wait until what comes has arrived and what goes has left."""
        self.work.result() if isinstance(self.work, Future) else self.work.wait()


class _Sender:
    """A thread that makes the exchanges of a group in their order. It ends with the group, or with its process."""

    def __init__(self, group: Any) -> None:
        self.tags = itertools.cycle(TAGS)  #: Of one exchange after the other, which ranks count alike
        self._calls: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        threading.Thread(target=_make, args=(self._calls,), daemon=True).start()
        finalize(group, self._calls.put, None)

    @classmethod
    def of(cls, group: Any) -> "_Sender":
        """The one of a group."""
        if (sender := _senders.get(group)) is None:
            sender = _senders[group] = cls(group)
        return sender

    def submit(self, call: "Callable[[], None]") -> "Future[None]":
        """Make the call once those before it have returned."""
        future = Future[None]()
        self._calls.put((call, future))
        return future


_senders = WeakKeyDictionary[Any, _Sender]()


def _make(calls: "SimpleQueue[tuple[Callable[[], None], Future[None]] | None]") -> None:
    while (given := calls.get()) is not None:
        call, future = given
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  whoever waits raises it
            future.set_exception(error)
        del given, call, future  # and the rows that they hold
