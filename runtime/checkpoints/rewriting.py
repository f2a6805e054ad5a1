"""All files of a checkpoint written again under a permutation, one after another."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial as bound

from ...errors import InputError
from ...files import sha256_json
from .config_names import is_config, renamed_config
from .copying import Copy
from .directory import INDEX, Directory
from .header import packed, read_header
from .layout import Layout
from .partial import Partial
from .permutation import Permutation
from .record import SourceFile
from .segments import Segment, segments_of
from .texts import with_strings

__all__ = ["OnProgress", "Rewriting"]

OnProgress = Callable[[int, int], None]  # takes the bytes written and those in all


@dataclass(frozen=True)
class Rewriting:
    """What is done to the files of a checkpoint.

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
        found = {name: os.stat(self.directory.path / name) for name in self.directory.names}
        states = {name: [file.st_size, file.st_ctime_ns] for name, file in found.items()}  # other times can be set
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
        if is_config(name):
            return Copy(renamed_config(path, rename), size, ())
        return Copy(b"", 0, [Segment(0, 0, size)])
