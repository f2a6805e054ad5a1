"""The files of a checkpoint's directory: those with tensors, those that name them, and the rest."""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError
from ...files import size_of
from .header import read_bounded, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEX_TEXT = "the index of a checkpoint"
MAX_INDEX_BYTES = 40 * 2**20
MAX_TENSORS = 300_000
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".npz")
OF_WEIGHTS = ".index.json"


@dataclass(frozen=True, slots=True)
class Directory:
    """The files of a checkpoint, by name below its directory."""

    path: Path
    shards: tuple[str, ...]  #: The safetensors files that together are the model
    others: tuple[str, ...]  #: Everything else to copy; the index, where there are several shards, among it
    #: Weights that are no part of the checkpoint: other formats and layouts of the model, whose experts would stay in
    #: the old order
    left_out: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The files to copy: files that may be refused first, large files last."""
        return self.others + self.shards

    @property
    def shard_paths(self) -> list[Path]:
        """Paths of the shards."""
        return [self.path / shard for shard in self.shards]

    def sizes(self) -> dict[str, int]:
        """The bytes of each file to copy.

        Raises
        ------
        InputError
            One is missing, as where a link points nowhere, or no regular file.
        """
        return {name: size_of(self.path / name, what="a file of a checkpoint") for name in self.names}

    @property
    def num_bytes(self) -> int:
        """The bytes to copy."""
        return sum(self.sizes().values())


def read_directory(path: str | os.PathLike[str]) -> Directory:
    """The files of a checkpoint, links to blobs as those of a cache among them; hidden files are passed over.

    Raises
    ------
    InputError
        No directory, no safetensors in it, a shard missing, or one without a tensor that the index puts there.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{folder}: no directory; expected a Hugging Face checkpoint with its config.json")
    names = sorted(_files(folder))
    if SINGLE in names:
        ours = {SINGLE}
    elif INDEX in names:
        ours = {INDEX, *_shards(folder)}
    else:
        weights = next((name for name in names if name.endswith(WEIGHTS)), "no weights")
        raise InputError(
            f"{folder}: {weights}, but no {SINGLE} nor {INDEX}; only safetensors are read: load and"
            " save_pretrained the model first"
        )
    foreign = {name for name in names if name.endswith((*WEIGHTS, OF_WEIGHTS))} - ours
    return Directory(
        folder,
        shards=tuple(sorted(ours - {INDEX})),
        others=tuple(name for name in names if name not in foreign | ours - {INDEX}),
        left_out=tuple(sorted(foreign)),
    )


def indexed(index: str | os.PathLike[str]) -> dict[str, str]:
    """The file of each tensor, all of them beside the index.

    Raises
    ------
    InputError
        No index, or of files elsewhere.
    """
    content = read_bounded(
        Path(index), what=INDEX_TEXT, max_bytes=MAX_INDEX_BYTES, objects=MAX_TENSORS, commas=MAX_TENSORS
    )
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict):
        raise InputError(f"{index}: no weight_map; expected {INDEX_TEXT}")
    for file in set(map(str, named.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise InputError(
                f"{index}: a shard called {file[:80]!r}; expected the name of a safetensors file beside it"
            )
    return {name: sys.intern(str(file)) for name, file in named.items()}


def _files(folder: Path) -> Iterator[str]:
    """The names below a directory of all files that are not hidden, nor in hidden directories."""
    for root, directories, files in os.walk(folder):
        directories[:] = [name for name in directories if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                file = Path(root, name).relative_to(folder).as_posix()
                if not file.isprintable():  # nor are the stand-ins for bytes that are no UTF-8
                    raise InputError(f"{folder}: a file called {file!r}; expected a printable name: rename it")
                yield file


def _shards(folder: Path) -> set[str]:
    """The files that an index names, each with every tensor that the index puts there."""
    named: dict[str, list[str]] = defaultdict(list)
    for tensor, file in indexed(folder / INDEX).items():
        named[file].append(tensor)
    if not named:
        raise InputError(f"{folder / INDEX}: names no tensor; expected the index of a checkpoint")
    for file, tensors in named.items():
        held = read_header(folder / file).tensors
        absent = [tensor for tensor in tensors if tensor not in held]
        if absent:
            raise InputError(
                f"{folder / file}: no {absent[0][:120]} ({len(absent)} absent), which {INDEX} puts there; expected the"
                " files of one checkpoint"
            )
    return set(named)
