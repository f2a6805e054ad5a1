"""A console on which lines that are too wide go on indented."""

import re
import textwrap
from typing import Any

from rich.console import Console

__all__ = ["HangingConsole", "hung"]

LABEL = re.compile(r"(?:\w+(?: \w+)? {2,}|unchecked |not there )(?=\S)")
LABEL_COLUMNS = 10


class HangingConsole(Console):
    """A rich console without markup, highlighting and emoji, whose plain text is `hung`."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, width=width)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, text hung."""
        told = (hung(one, self.width) if isinstance(one, str) else one for one in objects)
        super().print(*told, **{"soft_wrap": all(isinstance(one, str) for one in objects), **options})


def hung(text: str, width: int) -> str:
    """Text as wide as `width`, what goes on in a next line below a label's text, else indented by two.

    Words, such as paths, stay whole.
    """
    return "\n".join(_hung(line, width) for line in text.split("\n"))


def _hung(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    label = LABEL.match(line)
    columns = LABEL_COLUMNS if label and label.end() == LABEL_COLUMNS else 2
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * columns,
        break_on_hyphens=False,
        break_long_words=False,
    )
