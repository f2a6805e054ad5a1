"""Exchanges of rows between all ranks: called by `runtime`, measured by the cases `routed_exchange` and `all_gather`.

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
    """An all-to-all of rows, or a gather, under way."""

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
        with torch.no_grad():
            from_P, to_P = torch.split(arrived, [*received]), torch.split(rows, [*sent])
        messages = _Messages(group)
        peers = _others(messages.rank, len(to_P))
        coming = [messages.receive(from_P[peer], peer) for peer in peers]

        def exchange() -> None:
            """Send, and wait until all has gone and come."""
            going = [messages.send(to_P[peer], peer) for peer in peers]
            with torch.inference_mode():  # as either may be of one
                from_P[messages.rank].copy_(to_P[messages.rank])
            _wait(*coming, *going)

        return cls(messages.sender.submit(exchange))

    @classmethod
    def gather(
        cls,
        arrived: "Tensor",
        rows: "Tensor",
        counts: Sequence[int],
        devices_per_node: int,
        group: "ProcessGroup | None" = None,
    ) -> Self:
        """Send rows to all ranks, on the CPU; a collective call that does not wait.

        Parameters
        ----------
        arrived, rows
            `[m, ...]`, contiguous, to be written by rank, and `[n, ...]`. Both are left alone until `wait` returns.
        counts
            Rows of each rank, `[P]`, m in all.
        devices_per_node
            Ranks of each node, numbered in a row.

        Notes
        -----
        Ranks in the same place of their nodes pass rows round a ring of nodes, and each sends what comes on to the
        others of its node: rows reach a node once, from one other. With messages to all nodes at once four nodes took a
        quarter longer. Through gloo's own ring all ranks' blocks enter a node, each as long as the longest.
        """
        import torch

        with torch.no_grad():
            from_P = torch.split(arrived, [*counts])
        messages = _Messages(group)
        nodes = len(counts) // devices_per_node
        node, place = divmod(messages.rank, devices_per_node)
        before, after = ((node + step) % nodes * devices_per_node + place for step in (-1, 1))
        ring = [(node - step) % nodes * devices_per_node + place for step in range(nodes)]  # in the order of arrival
        near = [peer - place for peer in _others(place, devices_per_node)]  # steps to the other ranks of a node
        coming = [messages.receive(from_P[peer], before) for peer in ring[1:]]
        from_near = [messages.receive(from_P[peer + step], messages.rank + step) for step in near for peer in ring]

        def exchange() -> None:
            """Send all that comes to the next node and to the others of this one, and wait until all has gone."""
            with torch.inference_mode():
                from_P[messages.rank].copy_(rows)
            going = []
            for peer, work in zip(ring, (None, *coming), strict=True):
                _wait(work)
                going += [messages.send(from_P[peer], messages.rank + step) for step in near]
                if peer != after:
                    going.append(messages.send(from_P[peer], after))
            _wait(*from_near, *going)

        return cls(messages.sender.submit(exchange))

    def wait(self) -> None:
        """Wait until what comes has arrived and what goes has left."""
        self.work.result() if isinstance(self.work, Future) else self.work.wait()


class _Messages:
    """The messages of one exchange between ranks, which all make it in the same order; none is of no rows."""

    def __init__(self, group: "ProcessGroup | None") -> None:
        import torch.distributed as dist

        self.group, self.rank = group, dist.get_rank(group)
        here = group or dist.group.WORLD
        self.sender = _senders.get(here) or _senders.setdefault(here, _Sender())
        self._tag = next(self.sender.tags)

    def receive(self, rows: "Tensor", peer: int) -> "Work | None":
        """Post a receive; what one rank sends arrives in the order posted."""
        import torch.distributed as dist

        return dist.irecv(rows, group=self.group, group_src=peer, tag=self._tag) if len(rows) else None

    def send(self, rows: "Tensor", peer: int) -> "Work | None":
        """Send, without waiting."""
        import torch.distributed as dist

        return dist.isend(rows, group=self.group, group_dst=peer, tag=self._tag) if len(rows) else None


def _others(own: int, count: int) -> list[int]:
    """The numbers below `count` that follow this one, round to the one before it."""
    return [(own + step) % count for step in range(1, count)]


def _wait(*works: "Work | None") -> None:
    for work in filter(None, works):
        work.wait()


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
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    _threads.add(thread)


@atexit.register
def _join() -> None:
    until = time.monotonic() + END_S
    for thread in list(_threads):
        thread.join(max(0.0, until - time.monotonic()))


_senders = WeakKeyDictionary[Any, _Sender]()
_threads = WeakSet[threading.Thread]()
