"""The runs of bytes that a file is copied in: whole stretches where nothing moves, an expert's rows where they do.

Legend: E experts a layer.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .header import Header, Tensor
from .layout import ID_TYPES, Layout, Role
from .permutation import Permutation

__all__ = ["Segment", "segments_of"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bytes and where it goes.

    Parameters
    ----------
    source, target
        The offset of its first byte in either file.
    ids
        Where the bytes are numbers of experts: their type as numpy calls it.
    new
        Of those the new number of each expert, E.
    """

    source: int
    target: int
    num_bytes: int
    ids: str | None = None
    new: tuple[int, ...] = ()


def segments_of(header: Header, target_start: int, layout: Layout, permutation: Permutation) -> list[Segment]:
    """The bytes of all tensors of a file; each tensor stays where it was among the others.

    Parameters
    ----------
    target_start
        Where the first tensor begins in the new file.
    """
    tensors = sorted(header.tensors.items(), key=lambda item: item[1].begin)
    runs = (run for name, tensor in tensors for run in _runs(name, tensor, layout, permutation))
    starts = header.data_start, target_start
    return [replace(run, source=starts[0] + run.source, target=starts[1] + run.target) for run in _joined(runs)]


def _runs(name: str, tensor: Tensor, layout: Layout, permutation: Permutation) -> Iterator[Segment]:
    role, place, num_bytes = layout.role(name, tensor), layout.place(name), tensor.end - tensor.begin
    if place is None or role in (Role.STAYS, Role.RENAMED):
        yield Segment(tensor.begin, tensor.begin, num_bytes)
    elif role is Role.IDS:
        yield Segment(tensor.begin, tensor.begin, num_bytes, ID_TYPES[tensor.dtype], permutation.new[place[0]])
    else:
        row_bytes = num_bytes // layout.num_experts
        for new, old in enumerate(permutation.old[place[0]]):
            yield Segment(tensor.begin + old * row_bytes, tensor.begin + new * row_bytes, row_bytes)


def _joined(runs: Iterable[Segment]) -> Iterator[Segment]:
    """The runs, those that follow one another in both files as one."""
    first, end = Segment(0, 0, 0), 0
    for run in runs:
        moved = run.source - run.target != first.source - first.target
        if moved or run.source != end or run.ids or first.ids:
            yield replace(first, num_bytes=end - first.source)
            first = run
        end = run.source + run.num_bytes
    yield replace(first, num_bytes=end - first.source)
