"""Pickles that torch would load as data, and that fill the memory or never end, are refused before it does."""

import pickle
from typing import Any

import pytest

from moeplan.errors import InputError
from moeplan.traces.importers.torch_file import check_pickle


def shared(make: Any, depth: int = 60) -> Any:
    """A value that is short in a pickle and, told apart, longer than any memory."""
    value = make((1, 2))
    for _ in range(depth):
        value = make((value, value))
    return value


def reduced(module: str, name: str, arguments: bytes) -> bytes:
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + arguments + b"\x85R."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (reduced("builtins", "bytearray", b"J\xff\xff\xff\x7f"), r"GLOBAL builtins\.bytearray"),
        (reduced("torch._utils", "_rebuild_parameter", b"N"), r"GLOBAL torch\._utils\._rebuild_parameter"),
        (b"\x80\x02ccollections\nOrderedDict\n)R}X\x04\x00\x00\x00keysK\x01sb.", r"\(BUILD\)"),
        (pickle.dumps({1: shared(tuple)}, 2), "refers to a tuple, list or object a second time"),
        (pickle.dumps([shared(list)], 2), "refers to a tuple, list or object a second"),
        (pickle.dumps([{}] * 2, 2), "refers to a tuple, list or object a second time"),
        (pickle.dumps({k * (2**61 - 1): k for k in range(1, 9)}, 2), "a number out of all range"),
    ],
)
def test_what_costs_more_than_its_bytes_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_pickle(data)


def test_text_may_occur_again_and_lists_may_not_hide_behind_it() -> None:
    check_pickle(pickle.dumps([{"rank": 1, "records": ["rank", 2.5, None, True, -7, 2**40]}, {"rank": ()}], 2))
    with pytest.raises(InputError, match="a second time"):
        check_pickle(b"\x80\x02]q\x00q\x01h\x01\x86.")
