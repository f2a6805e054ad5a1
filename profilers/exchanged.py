"""The exchange of rows between all ranks: called by `runtime`, measured by the case `routed_exchange`.

Legend: P ranks of the group; n rows that this rank sends; m that it receives.
"""

import atexit
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary, WeakSet

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

IDLE_S = 0.1  # after which a thread ends
END_S = 5.0  # for which the end of a script waits for threads, as theirs may wait for a rank that is gone
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
        here = group or dist.group.WORLD
        sender = _senders.get(here) or _senders.setdefault(here, _Sender())
        tag, peers = next(sender.tags), [(rank + step) % size for step in range(1, size)]
        works = [dist.irecv(from_P[one], group=group, group_src=one, tag=tag) for one in peers if received[one]]

        def exchange() -> None:
            """Send, and wait until all has gone and come."""
            gone = [dist.isend(to_P[one], group=group, group_dst=one, tag=tag) for one in peers if sent[one]]
            with torch.inference_mode():  # as either may be of one
                from_P[rank].copy_(to_P[rank])
            for work in filter(None, (*works, *gone)):
                work.wait()

        return cls(sender.submit(exchange))

    def wait(self) -> None:
        """Wait until what comes has arrived and what goes has left."""
        self.work.result() if isinstance(self.work, Future) else self.work.wait()


class _Sender:
    """What makes the exchanges of a group in their order: a thread, while there are any."""

    def __init__(self) -> None:
        self.tags = itertools.cycle(TAGS)  #: Of one exchange after the other, which ranks count alike
        self._calls = SimpleQueue[tuple[Callable[[], None], "Future[None]"]]()
        self._lock, self._runs = threading.Lock(), False

    def submit(self, call: Callable[[], None]) -> "Future[None]":
        """Make the call once those before it have returned."""
        future = Future[None]()
        with self._lock:
            self._calls.put((call, future))
            if not self._runs:
                self._runs = True
                beside(self._make, "moeplan-exchanges")
        return future

    def _make(self) -> None:
        while True:
            try:
                call, future = self._calls.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    self._runs = not self._calls.empty()
                    if not self._runs:
                        return
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  whoever waits raises it
                future.set_exception(error)
            del call, future  # and the rows that they hold


def beside(call: Callable[[], None], name: str) -> None:
    """Make a call in a thread that the end of the script waits for: torch aborts if Python ends amid a call of it."""
    _threads.add(thread := threading.Thread(target=call, name=name, daemon=True))
    thread.start()


@atexit.register
def _join() -> None:
    until = time.monotonic() + END_S
    for thread in list(_threads):
        thread.join(max(0.0, until - time.monotonic()))


_senders = WeakKeyDictionary[Any, _Sender]()
_threads = WeakSet[threading.Thread]()
