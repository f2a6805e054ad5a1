"""A file of torch.save, read as data: tensors and plain values, mapped from the disk, nothing run.

Engines save tensors where they are, on their GPUs; here they come to the CPU. The pickle in the file is looked through
before it is loaded, so that loading costs what its bytes do: what torch loads as data may still fill the memory
(`bytearray(10**12)`) or never end (a tuple of a tuple twice, sixty deep, is hashed as a key, and such a list is quoted
in a message). Recordings have no need of either.
"""

import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from .source import refusing_damage

MAX_PICKLE_BYTES = 128 * 2**20  # beside the tensors; positions and token ids as lists take about 8 a token
ATOMS = frozenset({"BINUNICODE", "GLOBAL"})  # what a pickle may refer to again
PLAIN = ATOMS | {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPERSID", "BINPUT", "EMPTY_DICT",
    "EMPTY_LIST", "EMPTY_TUPLE", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK", "NEWFALSE", "NEWTRUE", "NONE", "PROTO",
    "REDUCE", "SETITEM", "SETITEMS", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip
TENSOR = re.compile(r"torch \w+Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict")
MAX_NUMBER = 2**60  # larger ones may all be hashed alike


def recognises(head: bytes) -> bool:
    """Check whether a file begins as torch.save begins one: an archive around a pickle, or as it did, a pickle."""
    if head.startswith(b"PK\x03\x04"):
        length = int.from_bytes(head[26:28], "little")
        return head[30 : 30 + length].endswith(b"/data.pkl")
    return head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")


def load(path: Path) -> Any:
    """The value in a file, its tensors not yet read.

    Raises InputError where it is damaged, or of more than tensors and plain values: what would have to be run is named.
    """
    with refusing_damage():
        _check_archive(path)
        import torch

        check_pickle(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def integers(value: Any, what: str, dimensions: int) -> NDArray[Any]:
    """The array of a tensor of integers, without a copy; InputError where it is none, or larger than its bytes."""
    import torch

    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    is_dense = isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    if not (is_dense and value.dtype in kinds and value.dim() == dimensions):
        kind = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"{what} is {kind}; expected a tensor of integers of {dimensions} dimensions")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise InputError(f"{what} of shape {tuple(value.shape)} is larger than its bytes in the file")
    return np.asarray(value.detach().numpy())


def check_pickle(data: bytes) -> None:
    """Refuse a pickle of more than tensors and plain values, and one that refers to a tuple, list or dict again.

    Raises
    ------
    InputError
        It is such a pickle.
    ValueError
        It is damaged.
    """
    containers, last = set[Any](), ""
    for code, argument, _ in pickletools.genops(data):
        name = code.name
        if name not in PLAIN or (name == "GLOBAL" and not TENSOR.fullmatch(str(argument))):
            what = f"GLOBAL {str(argument).replace(' ', '.')[:80]}" if name == "GLOBAL" else name
            raise InputError(f"needs more than tensors and plain values ({what}); not loaded")
        if name in ("BINGET", "LONG_BINGET") and argument in containers:
            raise InputError("refers to a tuple, list or object a second time; expected each value once")
        if name in ("BINPUT", "LONG_BINPUT"):
            (containers.discard if last in ATOMS else containers.add)(argument)
        else:
            last = name
        if name == "LONG1" and abs(int(str(argument))) >= MAX_NUMBER:
            raise InputError("a number out of all range; expected counts, positions and ids")


def _check_archive(path: Path) -> None:
    """Refuse what unpacks to more than the file holds, or a pickle that fills the memory."""
    if not zipfile.is_zipfile(path):
        raise InputError("cut off, or a pickle or torch's format before 1.6: loading it may run code; save it anew")
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size > size:
            raise InputError(f"{member.filename[:80]} unpacks to {member.file_size:,} bytes; expected what is stored")
        if member.filename.endswith("/data.pkl") and member.file_size > MAX_PICKLE_BYTES:
            raise InputError(f"{member.file_size:,} bytes beside tensors; expected at most {MAX_PICKLE_BYTES:,}")
