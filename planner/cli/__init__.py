"""The command line: each command a thin wrapper of a documented call, in a module that is imported when it is called.

Ctrl-C and SIGTERM get through: where an import or a compiler swallows one, it comes again.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from ...errors import MoeplanError, StorageError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["interruptible", "main"]

AGAIN_S = 0.05
INTERRUPTED = 128 + signal.SIGINT
IMPORTS = "<frozen importlib._bootstrap>"


def main() -> None:
    """Run the command line; an expected failure is one line on stderr and its exit code."""
    with interruptible():
        _run()


def _run() -> None:
    from .commands import group  # typer loads with it, when Ctrl-C is already handled

    try:
        code = group.main(prog_name="moeplan", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:
            raise KeyboardInterrupt  # of which typer makes a code
        sys.exit(code if isinstance(code, int) else 0)
    except MoeplanError as error:
        _tell(error)
    except BrokenPipeError:
        _drop_stdout()
        sys.exit(1)
    except OSError as error:
        _drop_stdout()
        _tell(StorageError(f"cannot write to stdout ({error.strerror})"))
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own say what was wrong with the words of the command
            raise
        message = error.format_message()
        if message.startswith("Usage:"):  # a group called without a command prints its help
            print(message, file=sys.stderr)
            sys.exit(UsageError.exit_code)
        words = message.rstrip(".").replace("Value error, ", "")  # pydantic's, by which typer reads values
        if problems := getattr(error.__cause__, "errors", None):
            words = words.replace("Input should be", f"{problems()[0]['input']!r:.40}; expected")
        command = getattr(getattr(error, "ctx", None), "command_path", "moeplan COMMAND")
        _tell(UsageError(f"{words}; see {command} --help"))


def _drop_stdout() -> None:
    """Let what is still to be printed go nowhere, so that Python does not try again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(error: MoeplanError) -> None:
    """The error as one line, and its exit code."""
    print(f"moeplan: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(error.exit_code)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """End the process with 130 on Ctrl-C in the block, with 143 on SIGTERM, whatever imports or numba make of it.

    The block ends by an exception, so that temporary files and local ranks are cleaned up: KeyboardInterrupt on Ctrl-C,
    after which what was measured may be kept, else SystemExit. A second Ctrl-C ends the cleaning up, too, a second
    SIGTERM does not. A process that ignores Ctrl-C, as a shell's `&` makes it, keeps ignoring it. Ctrl-C says on stderr
    what was written, unless the block has ended with words of its own.
    """
    came: signal.Signals | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Handle a signal: raise at once where that is safe, else come again."""
        nonlocal came
        unwinding = _is_unwinding()
        if number != signal.SIGALRM and not unwinding:
            came = signal.Signals(number)
        if _amid_imports(frame):
            come_again()
        in_machinery = frame is not None and frame.f_code.co_filename == IMPORTS  # whose callbacks cannot raise
        if not in_machinery and (number == signal.SIGINT or not unwinding):
            raise SystemExit(128 + came) if came == signal.SIGTERM else KeyboardInterrupt

    def come_again() -> None:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)

    def lost(unraisable: "sys.UnraisableHookArgs") -> None:
        """Answer what finalizers and callbacks of compiled code could not pass on."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
            come_again()
        elif came is None:  # else of what the signal left half done
            print_unraisable(unraisable)

    print_unraisable, sys.unraisablehook = sys.unraisablehook, lost
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
        if came != signal.SIGTERM and not isinstance(error, SystemExit):
            files: list[Path] = getattr(sys.modules.get("moeplan.files"), "written", list)()  # not loaded: none
            kept = f"wrote {', '.join(map(str, files))}" if files else "nothing was written"
            print(f"moeplan: interrupted; {kept}", file=sys.stderr)
        exec("")  # noqa: S102  forgets that one was interrupted, after which `python -m` ends by SIGINT, not by 130
        sys.exit(128 + (came or signal.SIGINT))


def _amid_imports(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != IMPORTS:
        frame = frame.f_back
    return frame is not None


def _is_unwinding() -> bool:
    """Check whether an exception that ends the process is on its way already."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        error = error.__context__
    return error is not None
