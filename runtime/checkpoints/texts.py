"""JSON texts of foreign files: of a bounded number of values, and their strings changed one by one."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...files import read_json, read_text

__all__ = ["check_crowd", "read_bounded", "with_strings"]

LITERAL = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"')  # possessive: else it remembers every character of a long one


def check_crowd(text: str, path: str | os.PathLike[str], *, objects: int, commas: int) -> None:
    """Refuse JSON of so many values that it would take far more memory than its text, before it is read.

    Raises
    ------
    InputError
        More objects, lists (two an object) or commas than a file of its kind may have.
    """
    for sign, most in (("{", objects), ("[", 2 * objects), (",", commas)):
        if (count := text.count(sign)) > most:
            raise InputError(f"{path}: {count:,} times {sign!r}, at most {most:,} are read; expected fewer tensors")


def read_bounded(path: Path, *, what: str, max_bytes: int, objects: int, commas: int) -> Any:
    """The value in a JSON file, as `files.read_json`, of a bounded number of values, as `check_crowd`."""
    check_crowd(read_text(path, what=what, max_bytes=max_bytes), path, objects=objects, commas=commas)
    return read_json(path, what=what, max_bytes=max_bytes)


def with_strings(text: str, change: Callable[[str], str], *, source: Path) -> str:
    """JSON text with `change` applied to each key and each string, every other byte left as it was written.

    Changed back by the inverse of `change`, it is what it was, byte for byte.

    Raises
    ------
    InputError
        A string that changes is written with escapes.
    """
    parts, end = [], 0
    for match in LITERAL.finditer(text):
        written = match[1]
        value = json.loads(match[0]) if "\\" in written else written
        after = change(value)
        if after == value:
            continue
        if value != written:
            raise InputError(f"{source}: {written[:120]} is written with escapes; expected a name in plain letters")
        parts += [text[end : match.start(1)], after]
        end = match.end(1)
    return "".join([*parts, text[end:]])
