"""All files of a checkpoint written again under a permutation, one after another, with one buffer in memory.

A new file is a head of its own, then runs of the old one's bytes: a whole stretch where nothing moves, one expert's
rows where experts do. Names of experts in the configuration, which tells what stays unquantised, change with them.

Legend: E experts per layer.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial as bound
from pathlib import Path

import numpy as np

from ...errors import InputError
from ...files import sha256_json
from .directory import INDEX, Directory
from .header import Header, Tensor, packed, read_bounded, read_header, with_strings
from .layout import EXPERT, ID_TYPES, NAME, Layout, Role
from .partial import Partial
from .permutation import Permutation, SourceFile

BUFFER_BYTES = 2**20  # whole ids, of whatever type; larger ones cost page faults
OnProgress = Callable[[int, int], None]  # takes the bytes written and those in all
CONFIG = "the configuration of a model"
MAX_CONFIG_BYTES = 16 * 2**20
MAX_CONFIG_VALUES = 300_000  # more than the tensors of a model whose configuration tells bits of each
WORD = re.compile(r"\bexperts?\b")
PROSE = re.compile(r"(?!.*experts?[.\\*]\S).*\s.*", re.DOTALL)
PART = r"[A-Za-z_]\w*"
ALL = re.compile(  # what may follow the word in a pattern that is the same for every expert
    rf"(?:\\?\.?\*(?:{PART})?|\\?\.(?:\\d\+|\[0-9\]\+|\.[*+]|\*)(?:{PART})?)?"  # any number
    rf"(?:\\?\.(?:{PART}|\({PART}(?:\|{PART})*\)(?:{PART})?))*"  # modules inside an expert
    r"(?:\.?\*|\\?\.)?\$?"
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bytes and where it goes."""

    #: source, target: the offset of its first byte in either file
    source: int
    target: int
    num_bytes: int
    ids: str | None = None  #: Where the bytes are numbers of experts: their type as numpy calls it
    new: tuple[int, ...] = ()  #: Of those the new number of each expert, E


@dataclass(frozen=True, slots=True)
class Copy:
    """The recipe of a file that is made from another."""

    head: bytes  #: Its first bytes, which take the place of the source's first `source_start`
    source_start: int
    segments: Sequence[Segment]  #: All other bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of the new file."""
        return len(self.head) + sum(run.num_bytes for run in self.segments)

    def is_made(self, target: Path) -> bool:
        """Check whether a file has the size and the head that it should have."""
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
        with _reading(source) as read, open(target, "xb") as writer:
            for start, size in _pieces(0, 0 if hash_target else self.source_start):
                digest.update(read(start, size))
            writer.write(self.head)
            for run in sorted(self.segments, key=lambda run: run.target if hash_target else run.source):
                for start, size in _pieces(run.source, run.num_bytes):
                    before = read(start, size)
                    after = before if run.ids is None else _renumbered(before, run, source)
                    digest.update(after if hash_target else before)
                    writer.seek(run.target + start - run.source)
                    writer.write(after)
                    on_bytes(size)
            writer.flush()
            os.fsync(writer.fileno())
        return digest.hexdigest()


@dataclass(frozen=True)
class Rewriting:
    """A permutation of all files of a checkpoint."""

    directory: Directory
    layout: Layout
    permutation: Permutation
    hash_target: bool = False  #: Whether the new files are hashed, or else those that they are made of
    #: Where in a file the first tensor is to begin; by default where it does
    data_starts: Mapping[str, int] = field(default_factory=dict)

    @property
    def job(self) -> str:
        """Hash of the rewriting, and of the names, sizes and times of its source files."""
        stats = {name: os.stat(self.directory.path / name) for name in self.directory.names}
        states = {name: [file.st_size, file.st_ctime_ns] for name, file in stats.items()}  # other times can be set
        return sha256_json([self.hash_target, list(self.permutation.old.items()), states])

    def run(self, partial: Partial, on_progress: OnProgress | None) -> dict[str, SourceFile]:
        """Write every file that is not complete yet; the hashes, and where the tensors began.

        Raises
        ------
        InputError
            The source cannot be read, or was changed in the meantime.
        """
        sizes = self.directory.sizes()
        partial.check_space(sum(size for name, size in sizes.items() if name not in partial.done))
        written, files = 0, {}

        def tell(num_bytes: int) -> None:
            """Report bytes that were written on top of those before."""
            nonlocal written
            written += num_bytes
            if on_progress is not None:
                on_progress(min(written, total), total)

        total = sum(sizes.values())
        for name, size in sizes.items():
            before, copy = written, self._copy(name)
            if name not in partial.done or not copy.is_made(partial.path / name):
                partial.forget(name)
                source = self.directory.path / name
                partial.add(name, copy.make(source, partial.scratch, hash_target=self.hash_target, on_bytes=tell))
            tell(before + size - written)
            starts = copy.source_start if name in self.directory.shards else None
            files[name] = SourceFile(sha256=partial.done[name], data_start=starts)
        if self.job != partial.job:
            raise InputError(f"{self.directory.path}: changed while it was read; nothing was kept: run again")
        return files

    def _copy(self, name: str) -> Copy:
        path = self.directory.path / name
        rename = bound(self.layout.renamed, permutation=self.permutation)
        if name in self.directory.shards:
            header = read_header(path)
            text = with_strings(header.text, rename, source=path)
            head = packed(text, at_least=self.data_starts.get(name, header.data_start))
            return Copy(head, header.data_start, _segments(header, len(head), self.layout, self.permutation))
        size = path.stat().st_size
        if name == INDEX:
            return Copy(with_strings(path.read_bytes().decode(), rename, source=path).encode(), size, ())
        if _is_config(name):
            return Copy(_renamed_config(path, rename), size, ())
        return Copy(b"", 0, [Segment(0, 0, size)])


def _segments(header: Header, target_start: int, layout: Layout, permutation: Permutation) -> list[Segment]:
    """Runs of all tensors of a file, in their order; the first begins at `target_start` of the new file."""
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


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Callable[[int, int], bytes]]:
    """Yield what reads the bytes of a file from an offset on, so many; its failures are those of an input."""

    def read(start: int, size: int) -> bytes:
        """So many bytes from an offset on."""
        try:
            stream.seek(start)
            data = stream.read(size)
        except OSError as error:
            raise InputError(f"{path}: cannot be read at byte {start:,} ({error.strerror})") from error
        if len(data) != size:
            raise InputError(f"{path}: ends at byte {start + len(data):,}; it was changed while it was read")
        return data

    try:
        stream = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    with stream:
        yield read


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


def _is_config(name: str) -> bool:
    """Check whether a file, named as below a checkpoint's directory, tells what stays unquantised, bits a module."""
    return name == "config.json" or ("/" not in name and "quant" in name and name.endswith(".json"))


def _renamed_config(path: Path, change: Callable[[str], str]) -> bytes:
    """A configuration with the experts that it names renamed; refuses a pattern that chooses among them."""
    read_bounded(path, what=CONFIG, max_bytes=MAX_CONFIG_BYTES, objects=MAX_CONFIG_VALUES, commas=MAX_CONFIG_VALUES)

    def renamed(text: str) -> str:
        """A string of the configuration, with its expert renamed if it is the name of a module of one."""
        word = WORD.search(text)
        if word is None or PROSE.fullmatch(text) or ALL.fullmatch(text, word.end()):
            return text
        match = NAME.fullmatch(text)
        if match and EXPERT.match(match[4]) and len(WORD.findall(text)) == 1:
            return change(text)
        raise InputError(
            f"{path}: {text[:120]!r} chooses among experts by a pattern; expected full names of modules: write them out"
        )

    return with_strings(path.read_bytes().decode(), renamed, source=path).encode()
