"""The index of a checkpoint in several files: which tensor is in which."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from ...errors import InputError
from ...files import read_json
from .literals import with_strings

__all__ = ["INDEX", "SINGLE", "indexed", "renamed_index"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WHAT = "the index of a checkpoint"
MAX_BYTES = 48 * 2**20  # 400,000 tensors


def indexed(index: str | os.PathLike[str]) -> dict[str, str]:
    """The file of each tensor, all of them beside the index.

    Raises
    ------
    InputError
        No index, or of files elsewhere.
    """
    content = read_json(index, what=WHAT, max_bytes=MAX_BYTES)
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict):
        raise InputError(f"{index}: no weight_map; expected {WHAT}")
    for file in set(map(str, named.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise InputError(
                f"{index}: a shard called {file[:80]!r}; expected the name of a safetensors file beside it"
            )
    return {name: sys.intern(str(file)) for name, file in named.items()}


def renamed_index(path: Path, rename: Callable[[str], str]) -> bytes:
    """An index, known to be one, whose tensors are renamed and stay in their files."""
    return with_strings(path.read_bytes().decode(), rename).encode()
