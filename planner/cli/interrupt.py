"""Ctrl-C that gets through: where an import swallows it, as some of other packages do, it comes again."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

__all__ = ["interruptible"]

EXIT_CODE = 130
AGAIN_S = 0.05
IMPORTS = "<frozen importlib._bootstrap>"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """End the process with 130 on Ctrl-C in the block, which ends by an exception, whatever an import makes of it.

    What ignores Ctrl-C, as a shell's `&` makes it, goes on to.
    """
    seen = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if _amid_imports(frame):
            seen = True
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        in_machinery = frame is not None and frame.f_code.co_filename == IMPORTS  # whose callbacks cannot raise
        if not in_machinery and (number == signal.SIGINT or not _is_unwinding()):
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not (seen or isinstance(error, KeyboardInterrupt) or getattr(error, "code", None) == EXIT_CODE):
            raise
        exec("")  # noqa: S102  forgets that one was interrupted, after which `python -m` ends by SIGINT, not by 130
        sys.exit(EXIT_CODE)


def _amid_imports(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != IMPORTS:
        frame = frame.f_back
    return frame is not None


def _is_unwinding() -> bool:
    """Whether a KeyboardInterrupt is on its way already."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
