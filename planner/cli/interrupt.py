"""Ctrl-C and SIGTERM that get through: where an import or a compiler swallows one, it comes again."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

__all__ = ["interruptible"]

AGAIN_S = 0.05
IMPORTS = "<frozen importlib._bootstrap>"
CALLED_FROM_C = os.path.join("llvmlite", "binding", "executionengine.py")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """End the process with 130 on Ctrl-C in the block, with 143 on SIGTERM, whatever imports or numba make of it.

    The block ends by an exception, so that temporary files and local ranks are cleaned up: KeyboardInterrupt on Ctrl-C,
    after which what was measured may be kept, else SystemExit. A second Ctrl-C ends the cleaning up, too, a second
    SIGTERM does not. A process that ignores Ctrl-C, as a shell's `&` makes it, keeps ignoring it.
    """
    came: signal.Signals | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        unwinding, frames = _is_unwinding(), list(_callers(frame))
        if number != signal.SIGALRM and not unwinding:
            came = signal.Signals(number)
        cannot_raise = _cannot_raise(frames)
        if cannot_raise or any(one.f_code.co_filename == IMPORTS for one in frames):
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        if not cannot_raise and (number == signal.SIGINT or not unwinding):
            raise SystemExit(128 + came) if came == signal.SIGTERM else KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if came is None and not isinstance(error, KeyboardInterrupt):
            raise
        # What else is raised, a compiler or an import makes of the signal.
        exec("")  # noqa: S102  forgets that one was interrupted, after which `python -m` ends by SIGINT, not by 130
        sys.exit(128 + (came or signal.SIGINT))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _cannot_raise(frames: Sequence[FrameType]) -> bool:
    """Whether what is raised would be printed and lost: in import's callbacks, the compiler's, and in finalizers."""
    codes = [frame.f_code for frame in frames]
    return any(
        (depth == 0 and code.co_filename == IMPORTS)
        or code.co_filename.endswith(CALLED_FROM_C)
        or code.co_name == "__del__"
        for depth, code in enumerate(codes)
    )


def _is_unwinding() -> bool:
    """Whether an exception that ends the process is on its way already."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        error = error.__context__
    return error is not None
