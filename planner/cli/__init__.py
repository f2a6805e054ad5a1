"""The command line: one command a module, each a thin wrapper of a documented call."""

import os
import sys

from ...errors import MoeplanError, StorageError, UsageError
from .interrupt import interruptible

__all__ = ["main"]


def main() -> None:
    """Run the command line; an expected failure is one line on stderr and its exit code."""
    with interruptible():
        _run()


def _run() -> None:
    from .commands import group  # typer loads with it, when Ctrl-C is already handled

    try:
        code = group.main(prog_name="moeplan", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except MoeplanError as error:
        _tell(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _tell(StorageError(f"cannot write to stdout ({error.strerror})"))
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own say what was wrong with the words of the command
            raise
        _tell_usage(error.format_message())


def _tell_usage(message: str) -> None:
    """Print a usage error found by typer, in one line. A group called without a command prints its help."""
    if message.startswith("Usage:"):
        print(message, file=sys.stderr)
        sys.exit(UsageError.exit_code)
    _tell(UsageError(f"{message.rstrip('.')}; see moeplan COMMAND --help"))


def _tell(error: MoeplanError) -> None:
    """The error as one line, and its exit code."""
    print(f"moeplan: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(error.exit_code)
