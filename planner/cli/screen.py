"""Output of commands: results to stdout as text or JSON, progress to stderr."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ...profilers.harness import Step

__all__ = ["byte_progress", "console", "end_interrupted", "print_json", "progress", "step_progress"]

LINE_S = 10.0
GIGA = 1e9


def console() -> "Console":
    """Stdout as a rich console: as wide as the terminal, 100 columns in a pipe."""
    from .hanging import HangingConsole

    screen, columns = HangingConsole(), os.environ.get("COLUMNS", "")
    piped = int(columns) if columns.isdecimal() and int(columns) else 100
    return screen if screen.is_terminal else HangingConsole(piped)


def print_json(value: Any) -> None:
    """`value` on stdout, one JSON document."""
    print(json.dumps(value, indent=1, allow_nan=False))


def end_interrupted(kept: str) -> NoReturn:
    """End as Ctrl-C does, saying what is kept."""
    print(f"moeplan: interrupted; {kept}", file=sys.stderr)
    raise typer.Exit(130)


@contextlib.contextmanager
def progress(*, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a call that says on stderr what is done: in a terminal with the time since, else not at all or by lines."""
    if not sys.stderr.isatty():
        yield _slow_lines() if lines else lambda _: None
        return
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    words = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=False))
    with _bar(SpinnerColumn(), words, TimeElapsedColumn()) as update:
        update(description="starting")
        yield lambda text: update(description=text)


@contextlib.contextmanager
def step_progress() -> Iterator[Callable[["Step"], None]]:
    """Yield what takes each step of the profiler's harness: a bar in a terminal, else a line every ten seconds."""
    if not sys.stderr.isatty():
        say = _slow_lines()
        yield lambda step: say(f"{_left(step)} ({step.place.key})")
        return
    from rich.progress import BarColumn, TextColumn

    with _bar(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}")) as update:
        update(description="starting ranks", left="")
        yield lambda step: update(description=step.place.key, completed=step.done, total=step.total, left=_left(step))


@contextlib.contextmanager
def byte_progress() -> Iterator[Callable[[int, int], None]]:
    """Yield what takes the bytes written and those in all: a bar in a terminal, else a line every ten seconds."""
    if not sys.stderr.isatty():
        say = _slow_lines()
        yield lambda done, total: say(f"{done / GIGA:.1f} of {total / GIGA:.1f} GB written")
        return
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with _bar(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as update:
        yield lambda done, total: update(completed=done, total=total)


@contextlib.contextmanager
def _bar(*columns: Any) -> Iterator[Callable[..., None]]:
    """Yield what updates a bar on stderr, which is gone afterwards."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=5) as bar:
        yield partial(bar.update, bar.add_task("", total=None, left=""))


def _slow_lines() -> Callable[[str], None]:
    """A call that prints a text on stderr, a line about every ten seconds."""
    last = time.monotonic()

    def say(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_S:
            last = time.monotonic()
            print(f"moeplan: {text}", file=sys.stderr, flush=True)

    return say


def _left(step: "Step") -> str:
    minutes, seconds = divmod(round(step.remaining_s), 60)
    return f"{step.done} of {step.total} sizes, {minutes}:{seconds:02} left"
