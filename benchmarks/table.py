"""A subject's one table on screen."""

from rich.console import Console
from rich.table import Table

from .result import Result
from .study import Row
from .units import cells, told

WIDTH = 100
COLUMNS = {"instance": 20, "method": 15, "quality": 10, "bound": 10, "seconds": 8, "MB": 6, "x base": 6}  # and widths


def show(result: Result) -> None:
    """Print every section under one head, and where it was measured."""
    console = Console(width=WIDTH, highlight=False, markup=False, emoji=False)
    console.print("=" * WIDTH, f"{result.subject}, {result.form}: {result.about}", sep="\n")
    console.print(_table([], "", head=True))
    for section in result.sections:
        against = f"; x base: times as fast as {section.baseline}" if section.baseline else ""
        console.print(f"\n{section.title}\nquality: {section.quality}{against}")
        table = _table(section.rows, section.quality)
        console.print(f"SKIPPED: {section.skipped}" if section.skipped else table)
    there = result.environment
    console.print(f"\n{there.cpu}, {there.cores} cores, load {there.load_at_start} to {there.load_at_end}\n")


def _table(rows: list[Row], quality: str, *, head: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, show_header=head, padding=(0, 1, 0, 0), width=WIDTH)
    for at, (name, width) in enumerate(COLUMNS.items()):
        table.add_column(name, width=width, justify="left" if at < 2 else "right")
    table.add_column("also", ratio=1)
    before = ""
    for row in rows:
        instance, *figures = cells(row, quality)
        table.add_row("" if instance == before else instance, *figures, told(row))
        before = instance
    return table
