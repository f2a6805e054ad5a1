"""The lines of a text file, numbered, none of them long enough to fill the memory."""

from collections.abc import Iterator
from pathlib import Path

from ...errors import InputError

__all__ = ["numbered_lines"]


def numbered_lines(path: Path, most_bytes: int, expected: str = "an object a line") -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1.

    Raises
    ------
    InputError
        A line is of more than `most_bytes`, where `expected` was.
    """
    with path.open("rb") as stream:
        number = 0
        while text := stream.readline(most_bytes + 1):
            number += 1
            if len(text) > most_bytes:
                raise InputError(f"line {number}: over {most_bytes:,} bytes; expected {expected}")
            if text.strip():
                yield number, text
