"""Ctrl-C and SIGTERM that get through: where an import swallows one, as some of other packages do, it comes again."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

__all__ = ["interruptible"]

AGAIN_S = 0.05
IMPORTS = "<frozen importlib._bootstrap>"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """End the process with 130 on Ctrl-C in the block, with 143 on SIGTERM, whatever an import makes of it.

    The block ends by an exception, so that temporary files and local ranks are cleaned up: KeyboardInterrupt on Ctrl-C,
    after which what was measured may be kept, else SystemExit. What ignores Ctrl-C, as a shell's `&` makes it, goes on
    to.
    """
    came, amid_imports = signal.SIGINT, False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came, amid_imports
        again = number == signal.SIGALRM
        came = came if again else signal.Signals(number)
        if _amid_imports(frame):
            amid_imports = True
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        in_machinery = frame is not None and frame.f_code.co_filename == IMPORTS  # whose callbacks cannot raise
        if not in_machinery and not (again and _is_unwinding()):
            raise KeyboardInterrupt if came == signal.SIGINT else SystemExit(128 + came)

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not (amid_imports or isinstance(error, KeyboardInterrupt) or getattr(error, "code", None) == 128 + came):
            raise
        exec("")  # noqa: S102  forgets that one was interrupted, after which `python -m` ends by SIGINT, not by 130
        sys.exit(128 + came)


def _amid_imports(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != IMPORTS:
        frame = frame.f_back
    return frame is not None


def _is_unwinding() -> bool:
    """Whether an exception that ends the process is on its way already."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        error = error.__context__
    return error is not None
