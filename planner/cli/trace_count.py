"""`moeplan trace count`: reduce a trace to counts."""

from typing import Annotated

import typer

from ...errors import UsageError
from .options import Phase
from .screen import Json, print_json, progress

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def count(
    trace: Annotated[str, typer.Argument(help="The trace: a directory, a file or a URI.")],
    output: Annotated[str, typer.Option("-o", "--output", help="Where the counts go: a directory.")],
    phase: Annotated[
        list[Phase] | None, typer.Option(help="Only tokens of this phase; may repeat.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Reduce a trace to its count form: tokens of every expert, by step, sample and source rank.

    Of a trace in count form it adds up the rows that agree in all of these.

    \b
    Example:
      moeplan trace count traces -o counts
    """
    from ...traces.count_form import CountTrace, condense, open_any, tabulate, write_counts
    from ...traces.model import MAX_NAME

    opened = open_any(trace)
    phases = [chosen.value for chosen in phase or ()] or None
    if isinstance(opened, CountTrace) and phases:
        raise UsageError(f"{trace}: counts do not say the phase of their tokens; leave --phase out")
    with progress() as say:
        say("counting")
        recorder = f"count of {opened.meta.recorder}"[:MAX_NAME]
        meta = opened.meta.model_copy(update={"form": "counts", "recorder": recorder})
        tables = condense(opened) if isinstance(opened, CountTrace) else tabulate(opened, phases=phases)
        parts = write_counts(output, meta, tables)
    keys = sorted(opened.known)
    if as_json:
        print_json({"counts": output, "parts": len(parts), "by": keys})
    else:
        rows = "rows of counts" if isinstance(opened, CountTrace) else "tokens"
        print(f"counted   {opened.num_rows:,} {rows} by {', '.join(keys) or 'layer only'}")
        print(f"wrote     {output}")
