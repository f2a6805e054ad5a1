"""A NumPy array in a file or in a zip archive of them, read row by row; nothing is allocated on a header's word."""

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from .source import naming, refusing_damage

MAX_EXPANSION = 200  # unpacked bytes a packed byte, allowed beyond FREE_BYTES
FREE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class NpyArray:
    """An array on disk whose header fits the bytes there are."""

    name: str  #: What messages call it
    #: path, member: the file, and the name in the archive; None for an `.npy` file
    path: Path
    member: str | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    header_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, which is what has one index less."""
        return int(np.prod(self.shape[1:], dtype=object)) * self.dtype.itemsize

    def rows(self, num_rows: int) -> Iterator[NDArray[Any]]:
        """The array, `num_rows` rows at a time; one in column order is read whole."""
        with _refusing(self.name), _stream(self.path, self.member) as stream:
            _read(stream, self.header_bytes)
            if self.fortran_order:
                whole = np.frombuffer(_read(stream, self.row_bytes * self.shape[0]), self.dtype)
                array = whole.reshape(self.shape[::-1]).T
                yield from (array[start : start + num_rows] for start in range(0, len(array), num_rows))
            else:
                for start in range(0, self.shape[0], num_rows):
                    count = min(num_rows, self.shape[0] - start)
                    data = _read(stream, count * self.row_bytes)
                    yield np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])
            if stream.read(1):  # reaching the end also checks an archive's CRC
                raise InputError("bytes after the last row")

    def scalar(self) -> Any:
        """The only element of an array of one."""
        if int(np.prod(self.shape, dtype=object)) != 1:
            raise InputError(f"{self.name} has shape {self.shape}; expected a single number")
        with _refusing(self.name), _stream(self.path, self.member) as stream:
            _read(stream, self.header_bytes)
            return np.frombuffer(_read(stream, self.dtype.itemsize), self.dtype)[0]


def open_arrays(path: Path) -> dict[str, NpyArray]:
    """The arrays of an `.npz` archive by name, or of an `.npy` file under the empty name.

    Raises InputError where one is damaged, of objects, or has a header that promises other bytes than there are.
    """
    with path.open("rb") as stream:
        if stream.read(6) == np.lib.format.MAGIC_PREFIX:
            return {"": _header("array", path, None, path.stat().st_size)}
    with _refusing("archive"), zipfile.ZipFile(path) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
    arrays: dict[str, NpyArray] = {}
    for info in members:
        name = info.filename.removesuffix(".npy")
        if not name.isprintable():
            raise InputError(f"an array called {name!r}; expected a printable name")
        if name in arrays:
            raise InputError(f"two arrays called {name}; expected one of each name")
        if info.file_size > max(FREE_BYTES, MAX_EXPANSION * info.compress_size):
            raise InputError(
                f"{name} unpacks from {info.compress_size:,} to {info.file_size:,} bytes;"
                f" expected at most {MAX_EXPANSION}-fold"
            )
        arrays[name] = _header(name, path, info.filename, info.file_size)
    return arrays


def companion(arrays: dict[str, NpyArray], name: str, shape: tuple[int, ...], kinds: str) -> NpyArray | None:
    """An array beside the main one, None where there is none; InputError where its shape or kind is another."""
    array = arrays.get(name)
    if array is not None and (array.shape != shape or array.dtype.kind not in kinds):
        expected = "floats" if kinds == "f" else "integers"
        raise InputError(f"{name} is {array.dtype} {array.shape}; expected {expected} of shape {shape}")
    return array


def integers_as(raw: NDArray[Any], kind: type[np.integer[Any]], name: str) -> NDArray[Any]:
    """Integers as another kind; InputError where it does not hold them."""
    if int(raw.min()) < np.iinfo(kind).min or int(raw.max()) > np.iinfo(kind).max:
        raise InputError(f"{name} from {raw.min()} to {raw.max()}; expected {np.dtype(kind)}")
    return raw.astype(kind)


def parse_array(name: str, data: bytes) -> NDArray[Any]:
    """The array that the bytes of an `.npy` file are; InputError where they are damaged or promise other bytes."""
    with _refusing(name):
        shape, fortran_order, dtype, header_bytes = _parse_header(data, len(data))
        flat = np.frombuffer(data, dtype, offset=header_bytes)
        return flat.reshape(shape[::-1]).T if fortran_order else flat.reshape(shape)


def _header(name: str, path: Path, member: str | None, size: int) -> NpyArray:
    with _refusing(name), _stream(path, member) as stream:
        shape, fortran_order, dtype, header_bytes = _parse_header(_read(stream, min(size, 64 * 2**10)), size)
        return NpyArray(name, path, member, shape, dtype, fortran_order, header_bytes)


def _parse_header(data: bytes, size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, column order, type and the header's own bytes, of a file of this size that begins so."""
    start = io.BytesIO(data)
    version = np.lib.format.read_magic(start)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise InputError(f"format version {version}; expected 1.0 or 2.0")
    shape, fortran_order, dtype = readers[version](start)
    if dtype.kind not in "iuf":
        raise InputError(f"elements of type {dtype}; expected integers or floats")
    expected = start.tell() + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if min(shape, default=0) < 0 or expected != size:
        raise InputError(f"header promises {dtype} {shape}, {expected:,} bytes in all; there are {size:,}")
    return shape, fortran_order, dtype, start.tell()


@contextmanager
def _stream(path: Path, member: str | None) -> Iterator[IO[bytes]]:
    if member is None:
        with path.open("rb") as stream:
            yield stream
    else:
        with zipfile.ZipFile(path) as archive, archive.open(member) as packed:
            yield packed


def _read(stream: IO[bytes], num_bytes: int) -> bytes:
    data = stream.read(num_bytes)
    if len(data) != num_bytes:
        raise InputError(f"{num_bytes - len(data):,} bytes are missing at the end")
    return data


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Turn whatever NumPy or zipfile says of an array into one line."""
    with naming(name), refusing_damage():
        yield
