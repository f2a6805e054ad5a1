"""`moeplan trace count`: reduce a token trace to counts."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Phase
from .screen import Json, print_json, progress

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def count(
    trace: Annotated[str, typer.Argument(help="The trace: a directory, a file or a URI.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the counts go.")],
    phase: Annotated[
        list[Phase] | None, typer.Option(help="Only tokens of this phase; may repeat.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Reduce a token trace to its count form: tokens of every expert, by step, sample and source rank.

    \b
    Example:
      moeplan trace count traces -o counts
    """
    from ...traces.count_form import tabulate, write_counts
    from ...traces.reader import open_trace

    opened = open_trace(trace)
    phases = [chosen.value for chosen in phase or ()] or None
    with progress() as say:
        say("counting")
        meta = opened.meta.model_copy(update={"form": "counts", "recorder": f"count of {opened.meta.recorder}"})
        parts = write_counts(output, meta, tabulate(opened, phases=phases))
    keys = sorted(opened.known)
    if as_json:
        print_json({"counts": str(output), "parts": len(parts), "by": keys})
    else:
        print(f"counted   {opened.num_tokens:,} tokens by {', '.join(keys) or 'layer only'}")
        print(f"wrote     {output}")
