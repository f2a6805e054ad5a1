"""How far a recording is, on stderr: animated in a terminal, else a line about every ten seconds."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from .screen import progress

__all__ = ["recording_progress"]

LINE_S = 10.0


@contextlib.contextmanager
def recording_progress() -> Iterator[Callable[[str], None]]:
    """Yield what takes each word of progress."""
    with progress() as say:
        yield say if sys.stderr.isatty() else _lines()


def _lines() -> Callable[[str], None]:
    told = time.monotonic()

    def tell(text: str) -> None:
        nonlocal told
        if time.monotonic() - told >= LINE_S:
            told = time.monotonic()
            print(f"moeplan: {text}", file=sys.stderr, flush=True)

    return tell
