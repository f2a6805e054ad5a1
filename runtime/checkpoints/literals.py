"""The strings in a JSON text changed one by one, every other byte left as it was written."""

import json
import re
from collections.abc import Callable

from ...errors import InputError

__all__ = ["with_strings"]

LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


def with_strings(text: str, change: Callable[[str], str]) -> str:
    """JSON text with `change` applied to each key and each string.

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
            raise InputError(f"{written[:120]} is written with escapes; expected a name in plain letters")
        parts += [text[end : match.start(1)], after]
        end = match.end(1)
    return "".join([*parts, text[end:]])
