"""Rows of replicated experts on their way between owners and holders of replicas, the same bits for every holder.

A row is cut into as many parts as its expert has replicas. On the way out the owner sends each replica's device one
part, and these send each other theirs; gradients come in by the same two exchanges backwards, each device adding up one
part. So a slot sends and receives at most one row each way, however many replicas its expert has, and the exchanges are
all-to-alls of the whole group: no group of holders is ever made.

Legend: D devices; S slots of this rank; O experts owned here that have replicas; R replicas here; W elements of a row.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ...solvers.arrays import Bools, Ints
from .route import Pending, Route


@dataclass(frozen=True, eq=False)
class ReplicaRows:
    """Rows that this rank sends and receives.

    Parameters
    ----------
    slots, owned
        The slot of each expert owned here that has replicas, int64 `[O]`, and the devices of these.
    kept
        The owner of each replica here, in the order of slots, and the devices of all replicas of its expert, R.
    """

    slots: Tensor
    owned: Sequence[list[int]]
    kept: Sequence[tuple[int, list[int]]]
    group: dist.ProcessGroup | None
    cuts: dict[int, "_Cut"] = field(default_factory=dict)  #: By width of rows

    @classmethod
    def of(
        cls,
        held_ED: Bools,
        owner_E: Ints,
        held: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> "ReplicaRows":
        """The rows of a layer; `held` are the experts in this rank's slots, `[S]`: owned ones, then by owner."""
        rank = dist.get_rank(group)
        devices = {
            expert: [d for d in held_ED[expert].nonzero()[0].tolist() if d != owner_E[expert]] for expert in held
        }
        here = [(slot, expert) for slot, expert in enumerate(held) if devices[expert]]
        owned = [(slot, devices[expert]) for slot, expert in here if owner_E[expert] == rank]
        return cls(
            torch.tensor([slot for slot, _ in owned], dtype=torch.int64, device=device),
            [there for _, there in owned],
            [(int(owner_E[expert]), devices[expert]) for _, expert in here if owner_E[expert] != rank],
            group,
        )

    def send(self, row_OW: Tensor) -> "Outgoing":
        """Begin to send owned rows to all who hold replicas; a collective call that does not wait."""
        cut = self._cut(row_OW.shape[1])
        pieces = torch.split(row_OW.flatten(), cut.owned)
        return Outgoing(cut, cut.scatter.start(_joined(pieces, cut.out, row_OW), range(1)))

    def summed(self, row_RW: Tensor) -> Tensor:
        """The sum over replicas of the rows that belong to each owned expert, in rank order, `[O, W]`; collective."""
        cut = self._cut(row_RW.shape[1])
        pieces = torch.split(row_RW.flatten(), cut.kept)
        arrived = iter(_split(cut.exchange.reversed().move(_joined(pieces, cut.theirs, row_RW)), cut.kept, cut.given))
        total = {piece: torch.zeros_like(pieces[piece]) for piece in cut.mine}
        for rank, given in enumerate(cut.given):
            mine = rank == dist.get_rank(self.group)
            adding = [pieces[piece] for piece in cut.mine] if mine else list(itertools.islice(arrived, len(given)))
            if adding:
                torch._foreach_add_([total[piece] for piece in (cut.mine if mine else given)], adding)
        parts = cut.scatter.reversed().move(_joined(total, [cut.mine], row_RW))
        pieces_O = dict(zip(_flat(cut.out), _split(parts, cut.owned, cut.out), strict=True))
        return _joined(pieces_O, [sorted(pieces_O)], row_RW).view(len(self.owned), cut.width)

    def _cut(self, width: int) -> "_Cut":
        if width not in self.cuts:
            self.cuts[width] = _Cut.of(self, width)
        return self.cuts[width]


@dataclass(slots=True)
class Outgoing:
    """Owned rows under way to the holders of replicas."""

    cut: "_Cut"
    scattered: Pending
    exchanged: Pending | None = None
    mine: dict[int, Tensor] | None = None

    def advance(self) -> None:
        """Pass on the parts that came from owners; a collective call that waits for those, and no other."""
        if self.exchanged is None:
            (arrived,) = self.scattered.wait()
            self.mine = dict(zip(self.cut.mine, _split(arrived, self.cut.kept, [self.cut.mine]), strict=True))
            self.exchanged = self.cut.exchange.start(_joined(self.mine, self.cut.given, arrived), range(1))

    def wait(self) -> Tensor:
        """The rows of the replicas here, `[R, W]`; a collective call."""
        self.advance()
        assert self.exchanged is not None
        assert self.mine is not None
        (arrived,) = self.exchanged.wait()
        theirs = zip(_flat(self.cut.theirs), _split(arrived, self.cut.kept, self.cut.theirs), strict=True)
        pieces = self.mine | dict(theirs)
        return _joined(pieces, [sorted(pieces)], arrived).view(len(self.cut.mine), self.cut.width)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The parts of rows of one width, numbered row by row; the lists by device name parts in the order they travel."""

    width: int  #: W
    owned: list[int]  #: Elements of each part of the rows owned here
    kept: list[int]  #: The same of the replicas here
    out: list[list[int]]  #: Parts of owned rows by the device that they are first sent to
    mine: list[int]  #: This device's own part of each replica here
    given: list[list[int]]  #: Those of them that each other device is to have
    theirs: list[list[int]]  #: And the parts that are the other devices' own
    scatter: Route
    exchange: Route

    @classmethod
    def of(cls, rows: ReplicaRows, width: int) -> "_Cut":
        """Cut rows of so many elements into a part for every holder."""
        rank, size = dist.get_rank(rows.group), dist.get_world_size(rows.group)
        owned, kept, mine, come = list[int](), list[int](), list[int](), [0] * size
        out, given, theirs = ([list[int]() for _ in range(size)] for _ in range(3))
        for devices in rows.owned:
            for number, device in enumerate(devices):
                out[device].append(len(owned) + number)
            owned += _parts(width, len(devices))
        for owner, devices in rows.kept:
            first, place = len(kept), len(kept) + devices.index(rank)
            kept += _parts(width, len(devices))
            mine.append(place)
            come[owner] += kept[place]
            for number, device in enumerate(devices):
                if device != rank:
                    given[device].append(place)
                    theirs[device].append(first + number)
        sent, gave, took = (
            [sum(sizes[part] for part in parts) for parts in lists]
            for sizes, lists in ((owned, out), (kept, given), (kept, theirs))
        )
        scatter, exchange = Route([sent], [come], rows.group), Route([gave], [took], rows.group)
        return cls(width, owned, kept, out, mine, given, theirs, scatter, exchange)


def _parts(width: int, count: int) -> list[int]:
    """Sizes of the parts of a row, as equal as can be."""
    return [width * (number + 1) // count - width * number // count for number in range(count)]


def _flat(lists: Iterable[Sequence[int]]) -> list[int]:
    return list(itertools.chain(*lists))


def _joined(pieces: Sequence[Tensor] | dict[int, Tensor], lists: Iterable[Sequence[int]], like: Tensor) -> Tensor:
    """Pieces one behind the other, in the order of `lists`."""
    return torch.cat([like.new_empty(0), *(pieces[number] for number in _flat(lists))])


def _split(arrived: Tensor, sizes: Sequence[int], lists: Iterable[Sequence[int]]) -> Sequence[Tensor]:
    """Arrived rows, as pieces in the order of `lists`."""
    return torch.split(arrived, [sizes[number] for number in _flat(lists)])
