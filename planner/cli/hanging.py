"""A console on which lines that are too wide go on indented."""

import re
import textwrap
from typing import Any

from rich.console import Console

__all__ = ["HangingConsole", "hung"]

LABEL = re.compile(r"(?=.{9} \S)(?:\w+(?: \w+)? {2,}|unchecked |not there )")
APART = re.compile(r"(?<=\S) {4}(?=\S)")


class HangingConsole(Console):
    """A rich console without markup, highlighting and emoji, whose plain text is `hung`."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, width=width)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, text hung."""
        if objects and all(isinstance(one, str) for one in objects):
            objects, options = tuple(hung(one, self.width) for one in objects), {"soft_wrap": True} | options
        super().print(*objects, **options)


def hung(text: str, width: int) -> str:
    """Text as wide as `width`: what is four spaces apart on a line of its own, the rest where words end.

    What goes on is below a label's text, else indented by two. Words, such as paths without spaces, stay whole.
    """
    return "\n".join(line if len(line) <= width else _hung(line, max(width, 1)) for line in text.split("\n"))


def _hung(line: str, width: int) -> str:
    label = LABEL.match(line)
    head = label.group() if label else ""
    first, *others = APART.split(line.removeprefix(head))
    indent = " " * (len(head) or 2)
    return "\n".join([_filled(first, width, head, indent), *(_filled(one, width, indent, indent) for one in others)])


def _filled(text: str, width: int, first: str, others: str) -> str:
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )
