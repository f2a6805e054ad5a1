"""All files of a checkpoint written again under a permutation, one after another.

Names of experts in the configuration, which tells what stays unquantised, change with them.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial as bound
from pathlib import Path

from ...errors import InputError
from ...files import sha256_json
from .copying import Copy, Segment, segments_of
from .directory import INDEX, Directory
from .header import packed, read_header
from .layout import EXPERT, NAME, Layout
from .partial import Partial
from .permutation import Permutation, SourceFile
from .texts import read_bounded, with_strings

__all__ = ["OnProgress", "Rewriting"]

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


@dataclass(frozen=True)
class Rewriting:
    """A permutation of all files of a checkpoint.

    Parameters
    ----------
    hash_target
        Whether the new files are hashed, or else those that they are made of.
    data_starts
        Where in a file the first tensor is to begin; by default where it does.
    """

    directory: Directory
    layout: Layout
    permutation: Permutation
    hash_target: bool = False
    data_starts: Mapping[str, int] = field(default_factory=dict)

    @property
    def job(self) -> str:
        """A hash of what is done, and of the names, sizes and times of the files that it is done to."""
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
            return Copy(head, header.data_start, segments_of(header, len(head), self.layout, self.permutation))
        size = path.stat().st_size
        if name == INDEX:
            return Copy(with_strings(path.read_bytes().decode(), rename, source=path).encode(), size, ())
        if _is_config(name):
            return Copy(_renamed_config(path, rename), size, ())
        return Copy(b"", 0, [Segment(0, 0, size)])


def _is_config(name: str) -> bool:
    """Whether a file, named as below a checkpoint's directory, tells what stays unquantised, bits a module."""
    return name == "config.json" or ("/" not in name and "quant" in name and name.endswith(".json"))


def _renamed_config(path: Path, change: Callable[[str], str]) -> bytes:
    """A configuration with the experts that it names renamed.

    Raises
    ------
    InputError
        No JSON, or a pattern in it chooses among experts.
    """
    read_bounded(path, what=CONFIG, max_bytes=MAX_CONFIG_BYTES, objects=MAX_CONFIG_VALUES, commas=MAX_CONFIG_VALUES)

    def renamed(text: str) -> str:
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
