"""All files of a checkpoint written again under a permutation, one after another."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial as bound

from ...files import sha256_json
from .config_names import CONFIGS, renamed_config
from .copying import Copy
from .directory import Directory
from .header import packed, read_header
from .index import INDEX, renamed_index
from .layout import Layout
from .literals import with_strings
from .partial import Partial
from .permutation import Permutation
from .record import SourceFile
from .segments import Segment, segments_of

__all__ = ["OnProgress", "Rewriting"]

OnProgress = Callable[[int, int], None]  # takes the bytes written and those in all


@dataclass(frozen=True)
class Rewriting:
    """What is done to the files of a checkpoint.

    Parameters
    ----------
    data_starts
        Where in a file the first tensor is to begin; by default where it does.
    """

    directory: Directory
    layout: Layout
    permutation: Permutation
    data_starts: Mapping[str, int] = field(default_factory=dict)

    def job(self, reason: str) -> str:
        """A hash of what is done and why, and of the names, sizes and times of the files that it is done to."""
        sizes = self.directory.sizes()
        states = {name: [size, os.stat(self.directory.path / name).st_mtime_ns] for name, size in sizes.items()}
        return sha256_json([reason, list(self.permutation.old.items()), states])

    def run(self, partial: Partial, *, hash_target: bool, on_progress: OnProgress | None) -> dict[str, SourceFile]:
        """Write every file that is not complete yet; the hashes of the new files, or else of those they are made of."""
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
                partial.add(name, copy.make(source, partial.scratch, hash_target=hash_target, on_bytes=tell))
            tell(before + size - written)
            starts = copy.source_start if name in self.directory.shards else None
            files[name] = SourceFile(sha256=partial.done[name], data_start=starts)
        return files

    def _copy(self, name: str) -> Copy:
        path = self.directory.path / name
        rename = bound(self.layout.renamed, permutation=self.permutation)
        if name in self.directory.shards:
            header = read_header(path)
            head = packed(with_strings(header.text, rename), at_least=self.data_starts.get(name, header.data_start))
            return Copy(head, header.data_start, segments_of(header, len(head), self.layout, self.permutation))
        size = os.path.getsize(path)
        if name == INDEX:
            return Copy(renamed_index(path, rename), size, ())
        if name in CONFIGS:
            return Copy(renamed_config(path, rename), size, ())
        return Copy(b"", 0, [Segment(0, 0, size)])
