"""Output of commands: results to stdout as text, wide lines hung, or as JSON; progress to stderr."""

import contextlib
import json
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from . import INTERRUPTED

if TYPE_CHECKING:
    from ...profilers.harness import Step

LINE_S = 10.0
GIGA = 1e9
LABEL = re.compile(r"(?=.{9} \S)(?:\w+(?: \w+)? {2,}|unchecked |not there )")
APART = re.compile(r"(?<=\S) {4}(?=\S)")


class HangingConsole(Console):
    """A rich console without markup, highlighting and emoji, whose plain text is `hung`."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, width=width)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, text hung."""
        if objects and all(isinstance(one, str) for one in objects):
            objects, options = tuple(hung(one, self.width) for one in objects), {"soft_wrap": True} | options
        super().print(*objects, **options)


def hung(text: str, width: int) -> str:
    """Text as wide as `width`: what is four spaces apart on a line of its own, the rest where words end.

    What goes on is below a label's text, else indented by two. Words, such as paths without spaces, stay whole.
    """
    return "\n".join(line if len(line) <= width else _hung(line, max(width, 1)) for line in text.split("\n"))


def console() -> HangingConsole:
    """Stdout as a rich console: as wide as the terminal, 100 columns in a pipe."""
    screen, columns = HangingConsole(), os.environ.get("COLUMNS", "")
    piped = int(columns) if columns.isdecimal() and int(columns) else 100
    return screen if screen.is_terminal else HangingConsole(piped)


def print_json(value: Any) -> None:
    """`value` on stdout, one JSON document."""
    print(json.dumps(value, indent=1, allow_nan=False))


def end_interrupted(kept: str) -> NoReturn:
    """End as Ctrl-C does, and say which results are kept."""
    print(f"moeplan: interrupted; {kept}", file=sys.stderr)
    sys.exit(INTERRUPTED)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a call that says on stderr what is done: in a terminal with the time since, else by lines."""
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    words = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=False))
    columns = SpinnerColumn(), words, TimeElapsedColumn()
    with _bar(*columns, line="{description}", start="starting") as update:
        yield lambda text: update(description=text)


@contextlib.contextmanager
def step_progress() -> Iterator[Callable[["Step"], None]]:
    """Yield a call that shows each step of the profiler's harness."""
    from rich.progress import BarColumn, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}")
    with _bar(*columns, line="{left} ({description})", start="starting ranks") as update:
        yield lambda step: update(description=step.place.key, completed=step.done, total=step.total, left=_left(step))


@contextlib.contextmanager
def byte_progress() -> Iterator[Callable[[int, int], None]]:
    """Yield a call that shows bytes written and bytes in all."""
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with _bar(*columns, line="{left}") as update:
        yield lambda done, total: update(
            completed=done, total=total, left=f"{done / GIGA:.1f} of {total / GIGA:.1f} GB written"
        )


@contextlib.contextmanager
def _bar(*columns: Any, line: str, start: str = "") -> Iterator[Callable[..., None]]:
    """Yield a call that updates the fields of a bar on stderr, which disappears at the end.

    Without a terminal they fill `line`, which is printed about every ten seconds if it was updated since.
    """
    if sys.stderr.isatty():
        from rich.progress import Progress

        with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=5) as bar:
            yield partial(bar.update, bar.add_task(start, total=None, left=""))
        return
    alone, last, newest, waiting = threading.Lock(), time.monotonic(), "", list[threading.Timer]()

    def tell() -> None:
        """Print the newest line."""
        nonlocal last
        last = time.monotonic()
        while waiting:
            waiting.pop().cancel()
        with contextlib.suppress(OSError):  # nobody reads them
            print(f"moeplan: {newest}", file=sys.stderr, flush=True)

    def tell_late() -> None:
        with alone:
            if waiting:
                tell()

    def say(**fields: Any) -> None:
        """Print a line, or the newest once a line's time is over."""
        nonlocal newest
        with alone:
            newest, left_s = line.format(**fields), last + LINE_S - time.monotonic()
            if left_s <= 0:
                tell()
            elif not waiting:  # what is said now may be all for long
                waiting.append(threading.Timer(left_s, tell_late))
                waiting[0].daemon = True
                waiting[0].start()

    try:
        yield say
    finally:
        with alone:
            while waiting:
                waiting.pop().cancel()


def _left(step: "Step") -> str:
    minutes, seconds = divmod(round(step.remaining_s), 60)
    return f"{step.done} of {step.total} sizes, {minutes}:{seconds:02} left"


def _hung(line: str, width: int) -> str:
    label = LABEL.match(line)
    head = label.group() if label else ""
    first, *others = APART.split(line.removeprefix(head))
    indent = " " * (len(head) or 2)
    fill = partial(textwrap.fill, width=width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return "\n".join([fill(first, initial_indent=head), *(fill(one, initial_indent=indent) for one in others)])
