"""The pickle in a file of torch.save, looked through before it is loaded, so that loading costs what its bytes do.

What torch loads as data may still fill the memory (`bytearray(10**12)`) or never end: a tuple of a tuple twice, sixty
deep, is hashed as a key, and such a list is quoted in a message. Recordings have no need of either.
"""

import pickletools
import re
from typing import Any

from ...errors import InputError

__all__ = ["check_pickle"]

ATOMS = frozenset({"BINUNICODE", "GLOBAL"})  # what a pickle may refer to again
PLAIN = ATOMS | {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPERSID", "BINPUT", "EMPTY_DICT",
    "EMPTY_LIST", "EMPTY_TUPLE", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK", "NEWFALSE", "NEWTRUE", "NONE", "PROTO",
    "REDUCE", "SETITEM", "SETITEMS", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip
TENSOR = re.compile(r"torch \w+Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict")
MAX_NUMBER = 2**60  # larger ones may all be hashed alike


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
        if code.name not in PLAIN or (code.name == "GLOBAL" and not TENSOR.fullmatch(str(argument))):
            raise InputError(f"needs more than tensors and plain values ({_named(code.name, argument)}); not loaded")
        if code.name in ("BINGET", "LONG_BINGET") and argument in containers:
            raise InputError("refers to a tuple, list or object a second time; expected each value once")
        if code.name in ("BINPUT", "LONG_BINPUT"):
            (containers.discard if last in ATOMS else containers.add)(argument)
        else:
            last = code.name
        if code.name == "LONG1" and abs(int(str(argument))) >= MAX_NUMBER:
            raise InputError("a number out of all range; expected counts, positions and ids")


def _named(code: str, argument: object) -> str:
    return f"{code} {str(argument).replace(' ', '.')[:80]}" if code == "GLOBAL" else code
