"""Names of experts in a model's configuration: what stays unquantised, bits a module."""

import re
from collections.abc import Callable
from pathlib import Path

from ...errors import InputError
from ...files import read_json
from .layout import EXPERT, NAME
from .literals import with_strings

__all__ = ["CONFIGS", "renamed_config"]

CONFIGS = ("config.json", "quantize_config.json", "quantization_config.json", "hf_quant_config.json")
WHAT = "the configuration of a model"
MAX_BYTES = 16 * 2**20
WORD = re.compile(r"\bexperts?\b")
PART = r"[A-Za-z_]\w*"
ALL = re.compile(  # what may follow the word in a pattern that is the same for every expert
    rf"(?:\\?\.?\*(?:{PART})?|\\?\.(?:\\d\+|\[0-9\]\+|\.[*+]|\*)(?:{PART})?)?"  # any number
    rf"(?:\\?\.(?:{PART}|\({PART}(?:\|{PART})*\)(?:{PART})?))*"  # modules inside an expert
    r"(?:\.?\*|\\?\.)?\$?"
)


def renamed_config(path: Path, rename: Callable[[str], str]) -> bytes:
    """A configuration with the experts that it names renamed.

    Raises
    ------
    InputError
        No JSON, or a pattern in it chooses among experts.
    """
    read_json(path, what=WHAT, max_bytes=MAX_BYTES)

    def renamed(text: str) -> str:
        word = None if any(sign.isspace() for sign in text) else WORD.search(text)
        if word is None or ALL.fullmatch(text, word.end()):
            return text
        match = NAME.fullmatch(text)
        if match and EXPERT.match(match[4]) and len(WORD.findall(text)) == 1:
            return rename(text)
        raise InputError(
            f"{path}: {text[:120]!r} chooses among experts by a pattern; expected full names of modules: write them out"
        )

    return with_strings(path.read_bytes().decode(), renamed).encode()
