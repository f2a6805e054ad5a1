"""The header of a safetensors file, checked before anything is believed, its text kept as it was written.

A file is 8 bytes that hold N, N bytes of JSON padded with spaces, then the bytes of all tensors without a gap.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ...errors import InputError
from ...files import size_of
from .texts import check_crowd

__all__ = ["Header", "Tensor", "packed", "read_header"]

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
        check_crowd(text, path, objects=MAX_TENSORS, commas=6 * MAX_TENSORS)
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
