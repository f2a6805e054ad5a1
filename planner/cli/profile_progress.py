"""How far a run of the profiler is, on stderr: a bar in a terminal, else a line every ten seconds."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .screen import slow_lines

if TYPE_CHECKING:
    from ...profilers.harness import Step

__all__ = ["profile_progress"]

Listener = Callable[["Step"], None]


@contextlib.contextmanager
def profile_progress() -> Iterator[Listener]:
    """Yield what takes each step of the harness."""
    if not sys.stderr.isatty():
        say = slow_lines()
        yield lambda step: say(f"{_left(step)} ({step.place.key})")
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    words = TextColumn("{task.description}"), TextColumn("{task.fields[left]}")
    with Progress(
        words[0], BarColumn(), words[1], console=Console(stderr=True), transient=True, refresh_per_second=2
    ) as bar:
        task = bar.add_task("starting ranks", total=None, left="")
        yield lambda step: bar.update(
            task, description=step.place.key, completed=step.done, total=step.total, left=_left(step)
        )


def _left(step: "Step") -> str:
    minutes, seconds = divmod(round(step.remaining_s), 60)
    return f"{step.done} of {step.total} sizes, {minutes}:{seconds:02} left"
