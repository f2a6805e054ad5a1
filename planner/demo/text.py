"""The text of the embedded model: Python's own documentation, as every installation carries it in `pydoc_data.topics`.

Topics repeat each other, so each paragraph counts once, by its words. `heldout.txt` ships: of the blocks of consecutive
paragraphs (2,048 characters and more) in Python 3.11, every sixth, alternately to its first and its second half.
What other Pythons carry differs a little; none of the shipped paragraphs is ever trained on.

Legend: I samples; S positions.
"""

from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError

__all__ = ["other_text", "record_text", "samples", "training_text"]


def training_text() -> str:
    """The documentation in the running Python, topics sorted, without repeated and held-out paragraphs."""
    from pydoc_data.topics import topics

    seen = {"", *map(_words, _paragraphs(_held_out()))}
    fresh: list[str] = []
    for topic in sorted(topics):
        for paragraph in _paragraphs(topics[topic]):
            if _words(paragraph) not in seen:
                seen.add(_words(paragraph))
                fresh.append(paragraph)
    return "\n\n".join(fresh)


def record_text() -> str:
    """The half of the held-out text that traces are recorded on."""
    return _held_out()[: _middle()]


def other_text() -> str:
    """The half of the held-out text that neither training nor recording sees."""
    return _held_out()[_middle() :].lstrip("\n")


def samples(text: str, length: int) -> NDArray[np.int64]:
    """The UTF-8 bytes of `text` cut into samples, `[I, length]`; an incomplete last one is dropped.

    Raises
    ------
    UsageError
        The text does not fill one sample.
    """
    tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
    if not 1 <= length <= len(tokens):
        raise UsageError(
            f"a text of {len(tokens)} bytes does not fill a sample of {length} (a token is a byte); give more text or"
            " another --sample-tokens"
        )
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def _held_out() -> str:
    return (files(__package__) / "heldout.txt").read_text(encoding="utf-8")


def _middle() -> int:
    """The paragraph end nearest behind the middle of the held-out text."""
    text = _held_out()
    return text.index("\n\n", len(text) // 2)


def _paragraphs(text: str) -> list[str]:
    return text.strip("\n").split("\n\n")


def _words(paragraph: str) -> str:
    return " ".join(paragraph.split())
