"""JSON texts of a checkpoint: headers of safetensors files, bounds before any is read, and strings changed in place.

A safetensors file is 8 bytes that hold N, N bytes of JSON padded with spaces, then the bytes of all tensors without a
gap. Nothing of a header is believed before it was checked, and its text is kept as it was written.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...errors import InputError
from ...files import read_json, read_text, size_of

WHAT = "a safetensors file"
MAX_BYTES = 24 * 2**20
MAX_TENSORS = 100_000  # in one file; a checkpoint of more has several files
LENGTH_BYTES, ALIGNMENT = 8, 8
MAX_AXES, MAX_SIZE = 16, 2**62
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
BITS |= dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
BITS |= dict.fromkeys(("U16", "I16", "F16", "BF16"), 16)
BITS |= dict.fromkeys(("U32", "I32", "F32"), 32)
BITS |= dict.fromkeys(("U64", "I64", "F64", "C64"), 64)
LITERAL = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"')  # possessive: else it remembers every character of a long one


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's type and shape; its bytes are `[begin, end)` of those after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """Contents of a file: the JSON text without its padding, the tensors by name, and where their bytes begin."""

    text: str
    tensors: Mapping[str, Tensor]
    data_start: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a safetensors file.

    Raises
    ------
    InputError
        No such file, or its header is too large, no JSON, or disagrees with itself or the size of the file.
    """
    size = size_of(path, what=WHAT)
    try:
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES + 2 or length > size - LENGTH_BYTES:
                _refuse(f"{size:,} bytes, {length:,} of them header")
            if length > MAX_BYTES:
                _refuse(f"a header of {length:,} bytes, at most {MAX_BYTES:,} are read")
            text = stream.read(length).decode()
        _check_crowd(text, path, objects=MAX_TENSORS, commas=6 * MAX_TENSORS)
        tensors = _tensors(text, size - LENGTH_BYTES - length)
    except (OSError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:160]
        raise InputError(f"{path}: damaged ({reason}); expected {WHAT}") from error
    return Header(text.rstrip(" "), tensors, LENGTH_BYTES + length)


def packed(text: str, *, at_least: int = 0) -> bytes:
    """The bytes before a file's tensors for this text: of `at_least` bytes in all, else of the fewest that align.

    Parameters
    ----------
    at_least
        `data_start` of a header whose size is to be kept.
    """
    content = text.encode()
    length = max(at_least - LENGTH_BYTES, len(content))
    if length > at_least - LENGTH_BYTES:
        length += -length % ALIGNMENT
    return length.to_bytes(LENGTH_BYTES, "little") + content.ljust(length)


def read_bounded(path: Path, *, what: str, max_bytes: int, objects: int, commas: int) -> Any:
    """The value in a JSON file, as `files.read_json`, of a bounded number of values, else an InputError."""
    _check_crowd(read_text(path, what=what, max_bytes=max_bytes), path, objects=objects, commas=commas)
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


def _check_crowd(text: str, path: str | os.PathLike[str], *, objects: int, commas: int) -> None:
    """Refuse, before it is read, JSON of more objects, lists (two an object) or commas than fit in memory."""
    for sign, most in (("{", objects), ("[", 2 * objects), (",", commas)):
        if (count := text.count(sign)) > most:
            raise InputError(f"{path}: {count:,} times {sign!r}, at most {most:,} are read; expected fewer tensors")


def _tensors(text: str, num_bytes: int) -> dict[str, Tensor]:
    """The tensors that a header names, which together must take up `num_bytes`."""
    tensors = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    if not isinstance(tensors, dict):
        _refuse("a header that is no object")
    tensors.pop("__metadata__", None)
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: _extent(*item)):
        if tensor.begin != position:
            _refuse(f"{name[:80]} begins at byte {tensor.begin:,}, where {position:,} was expected")
        position = tensor.end
    if position != num_bytes:
        _refuse(f"tensors of {position:,} bytes in {num_bytes:,}")
    return tensors


def _object(pairs: list[tuple[str, Any]]) -> Any:
    """A JSON object, one that describes a tensor as a `Tensor`: a header may hold a hundred thousand."""
    described = dict(pairs)
    if len(described) != len(pairs):
        _refuse("a name twice")
    if described.keys() != {"dtype", "shape", "data_offsets"}:
        return described
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not (isinstance(dtype, str) and dtype in BITS):
        _refuse(f"a tensor of type {str(dtype)[:40]!r}")
    if not (_sizes(shape) and _sizes(offsets) and len(shape) <= MAX_AXES and len(offsets) == 2):
        _refuse(f"a tensor of shape {str(shape)[:40]} at {str(offsets)[:60]}")
    begin, end = offsets
    if math.prod(shape) * BITS[dtype] != (end - begin) * 8:
        _refuse(f"a tensor of {dtype} {shape} in bytes {begin} to {end}")
    return Tensor(dtype, tuple(shape), begin, end)


def _sizes(value: Any) -> bool:
    if not (isinstance(value, list) and {int}.issuperset(map(type, value))):
        return False
    return min(value, default=0) >= 0 and max(value, default=0) <= MAX_SIZE


def _extent(name: str, tensor: Any) -> tuple[int, int]:
    if not isinstance(tensor, Tensor):
        _refuse(f"{name[:80]} is described by something else than dtype, shape and data_offsets")
    return tensor.begin, tensor.end


def _refuse(reason: str) -> NoReturn:
    raise ValueError(reason)
