"""A file of torch.save, read as data: tensors and plain values, mapped from the disk, nothing run.

Engines save tensors where they are, on their GPUs; here they come to the CPU.
"""

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from .torch_pickle import check_pickle

__all__ = ["integers", "load", "recognises"]

MAX_PICKLE_BYTES = 128 * 2**20  # beside the tensors; positions and token ids as lists take about 8 a token
DAMAGE = (ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, ImportError, LookupError, MemoryError,
          OSError, RuntimeError, TypeError, ValueError, Warning, pickle.PickleError, struct.error,
          zipfile.BadZipFile)  # fmt: skip


def recognises(head: bytes) -> bool:
    """Whether a file begins as torch.save begins one: an archive around a pickle, or as it did, a pickle."""
    if head.startswith(b"PK\x03\x04"):
        length = int.from_bytes(head[26:28], "little")
        return head[30 : 30 + length].endswith(b"/data.pkl")
    return head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")


def load(path: Path) -> Any:
    """The value in a file, its tensors not yet read.

    Raises
    ------
    InputError
        Damaged, or of more than tensors and plain values: what would have to be run is named.
    """
    try:
        _check_archive(path)
        import torch

        check_pickle(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except DAMAGE as error:
        reason = " ".join((str(error) or type(error).__name__)[:160].split())
        raise InputError(f"damaged ({reason})") from error


def integers(value: Any, what: str, dimensions: int) -> NDArray[Any]:
    """The array of a tensor of integers, without a copy.

    Raises
    ------
    InputError
        It is something else, or larger than its bytes in the file.
    """
    import torch

    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    is_dense = isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    if not (is_dense and value.dtype in kinds and value.dim() == dimensions):
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"{what} is {found}; expected a tensor of integers of {dimensions} dimensions")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise InputError(f"{what} of shape {tuple(value.shape)} is larger than its bytes in the file")
    return np.asarray(value.detach().numpy())


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
