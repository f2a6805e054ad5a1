"""A subject's one table on screen."""

import textwrap

from rich.console import Console
from rich.table import Table

from .result import Result, Section
from .units import cells, told

WIDTH = 100
COLUMNS = {"instance": 26, "method": 20, "quality": 11, "bound": 11, "seconds": 10, "MB": 8, "x base": 8}  # and widths
INDENT = " " * 28  # of a row's further figures, on lines of their own


def show(result: Result) -> None:
    """Print every section under one head, and where it was measured."""
    console = Console(width=WIDTH, highlight=False, markup=False, emoji=False)
    console.print("=" * WIDTH, f"{result.subject}, {result.form}: {result.about}", sep="\n")
    console.print(_line(list(COLUMNS)))
    for section in result.sections:
        _show(section, console)
    there = result.environment
    console.print(f"\n{there.cpu}, {there.cores} cores, load {there.load_at_start} to {there.load_at_end}\n")


def _show(section: Section, console: Console) -> None:
    against = f"; x base: times as fast as {section.baseline}" if section.baseline else ""
    console.print(f"\n{section.title}\nquality: {section.quality}{against}")
    if section.skipped:
        console.print(f"SKIPPED: {section.skipped}")
    before = ""
    for row in section.rows:
        instance, *figures = cells(row, section.quality)
        console.print(_line(["" if instance == before else instance, *figures]))
        if row.more:
            console.print(textwrap.fill(told(row), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))
        before = instance


def _line(fields: list[str]) -> Table:
    line = Table.grid(padding=(0, 1, 0, 0))
    for at, width in enumerate(COLUMNS.values()):
        line.add_column(width=width - 1, justify="left" if at < 2 else "right")
    line.add_row(*fields)
    return line
