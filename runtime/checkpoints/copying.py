"""A file written anew from another: a head of its own, then runs of the other's bytes, one buffer in memory.

Where nothing moves a run is a whole stretch; where experts do it is one expert's rows.

Legend: E experts a layer.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...errors import InputError
from .header import Header, Tensor
from .layout import ID_TYPES, Layout, Role
from .permutation import Permutation

__all__ = ["Copy", "Segment", "segments_of"]

BUFFER_BYTES = 2**20  # whole ids, of whatever type; larger ones cost page faults


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


@dataclass(frozen=True, slots=True)
class Copy:
    """The recipe of a file that is made from another.

    Parameters
    ----------
    head
        Its first bytes, which take the place of the source's first `source_start`.
    segments
        All other bytes.
    """

    head: bytes
    source_start: int
    segments: Sequence[Segment]

    @property
    def num_bytes(self) -> int:
        """The bytes of the new file."""
        return len(self.head) + sum(run.num_bytes for run in self.segments)

    def is_made(self, target: Path) -> bool:
        """Whether a file has the size and the head that it should have."""
        if not target.is_file() or target.stat().st_size != self.num_bytes:
            return False
        with open(target, "rb") as stream:
            return stream.read(len(self.head)) == self.head

    def make(self, source: Path, target: Path, *, hash_target: bool, on_bytes: Callable[[int], None]) -> str:
        """Write the file; the SHA-256 of the new file or else of the source, in the order of whose bytes it goes.

        Raises
        ------
        InputError
            The source cannot be read, or names an expert that is none.
        OSError
            The new file cannot be written.
        """
        digest = hashlib.sha256(self.head if hash_target else b"")
        with _Source(source) as reader, open(target, "xb") as writer:
            for start, size in _pieces(0, 0 if hash_target else self.source_start):
                digest.update(reader.read(start, size))
            writer.write(self.head)
            for run in sorted(self.segments, key=lambda run: run.target if hash_target else run.source):
                for start, size in _pieces(run.source, run.num_bytes):
                    before = reader.read(start, size)
                    after = before if run.ids is None else _renumbered(before, run, source)
                    digest.update(after if hash_target else before)
                    writer.seek(run.target + start - run.source)
                    writer.write(after)
                    on_bytes(size)
            writer.flush()
            os.fsync(writer.fileno())
        return digest.hexdigest()


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


class _Source:
    """A file that is read from, whose failures are those of an input."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.stream = open(path, "rb")  # noqa: SIM115
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error

    def __enter__(self) -> "_Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def read(self, start: int, size: int) -> bytes:
        try:
            self.stream.seek(start)
            data = self.stream.read(size)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read at byte {start:,} ({error.strerror})") from error
        if len(data) != size:
            raise InputError(f"{self.path}: ends at byte {start + len(data):,}; it was changed while it was read")
        return data


def _pieces(start: int, size: int) -> Iterator[tuple[int, int]]:
    """The offset and size of each piece, of at most one buffer."""
    for offset in range(0, size, BUFFER_BYTES):
        yield start + offset, min(BUFFER_BYTES, size - offset)


def _renumbered(data: bytes, run: Segment, source: Path) -> bytes:
    """Numbers of experts, as the new ones."""
    assert run.ids is not None
    ids, new_E = np.frombuffer(data, run.ids), np.array(run.new, run.ids)
    if wrong := ids[(ids < 0) | (ids >= new_E.size)].tolist():
        raise InputError(f"{source}: names expert {wrong[0]}; expected 0 to {new_E.size - 1}")
    renumbered: bytes = new_E[ids].tobytes()
    return renumbered
