"""Names of experts in a model's configuration: what stays unquantised, bits a module."""

import re
from collections.abc import Callable
from pathlib import Path

from ...errors import InputError
from .layout import EXPERT, NAME
from .texts import read_bounded, with_strings

__all__ = ["is_config", "renamed_config"]

WHAT = "the configuration of a model"
MAX_BYTES = 16 * 2**20
MAX_VALUES = 300_000  # more than the tensors of a model whose configuration tells bits of each
WORD = re.compile(r"\bexperts?\b")
PROSE = re.compile(r"(?!.*experts?[.\\*]\S).*\s.*", re.DOTALL)
PART = r"[A-Za-z_]\w*"
ALL = re.compile(  # what may follow the word in a pattern that is the same for every expert
    rf"(?:\\?\.?\*(?:{PART})?|\\?\.(?:\\d\+|\[0-9\]\+|\.[*+]|\*)(?:{PART})?)?"  # any number
    rf"(?:\\?\.(?:{PART}|\({PART}(?:\|{PART})*\)(?:{PART})?))*"  # modules inside an expert
    r"(?:\.?\*|\\?\.)?\$?"
)


def is_config(name: str) -> bool:
    """Whether a file, named as below a checkpoint's directory, tells what stays unquantised, bits a module."""
    return name == "config.json" or ("/" not in name and "quant" in name and name.endswith(".json"))


def renamed_config(path: Path, change: Callable[[str], str]) -> bytes:
    """A configuration with the experts that it names renamed.

    Raises
    ------
    InputError
        No JSON, or a pattern in it chooses among experts.
    """
    read_bounded(path, what=WHAT, max_bytes=MAX_BYTES, objects=MAX_VALUES, commas=MAX_VALUES)

    def renamed(text: str) -> str:
        word = WORD.search(text)
        if word is None or PROSE.fullmatch(text) or ALL.fullmatch(text, word.end()):
            return text
        match = NAME.fullmatch(text)
        if match and EXPERT.match(match[4]) and len(WORD.findall(text)) == 1:
            return change(text)
        raise InputError(
            f"{path}: {text[:120]!r} chooses among experts by a pattern; expected full names of modules: write them out"
        )

    return with_strings(path.read_bytes().decode(), renamed, source=path).encode()
