"""Output of commands: results to stdout as text or JSON, progress to stderr."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Json", "Verbose", "console", "print_json", "progress", "slow_lines"]

LINE_S = 10.0

Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print all figures, bounds and details.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def console() -> "Console":
    """Stdout as a rich console: as wide as the terminal, 100 columns in a pipe."""
    from .hanging import HangingConsole

    found = HangingConsole()
    return found if found.is_terminal else HangingConsole(_piped_width())


def print_json(value: Any) -> None:
    """`value` on stdout, one JSON document."""
    print(json.dumps(value, indent=1, allow_nan=False))


@contextlib.contextmanager
def progress(*, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a call that says on stderr what is done: in a terminal with the time since, else not at all or by lines."""
    if not sys.stderr.isatty():
        yield slow_lines() if lines else lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    words = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=False))
    shown = Progress(SpinnerColumn(), words, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    with shown:
        task = shown.add_task("starting", total=None)
        yield lambda text: shown.update(task, description=text)


def slow_lines() -> Callable[[str], None]:
    """A call that prints what it is told on stderr, a line about every ten seconds."""
    told = time.monotonic()

    def tell(text: str) -> None:
        nonlocal told
        if time.monotonic() - told >= LINE_S:
            told = time.monotonic()
            print(f"moeplan: {text}", file=sys.stderr, flush=True)

    return tell


def _piped_width() -> int:
    import os

    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else 100
