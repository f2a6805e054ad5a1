"""`moeplan trace info`: say what is in a trace."""

from pathlib import Path
from typing import Annotated

import typer

from .screen import Json, console, print_json, progress

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def info(
    trace: Annotated[str, typer.Argument(help="The trace: a directory, a file or a URI.")] = "traces",
    plot: Annotated[
        Path | None, typer.Option(help="Also draw it, as a page that needs no network.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the shuffles that figures stand beside.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Say what is in a trace: tokens, samples, phases, skew of every layer, affinity between layers, locality.

    \b
    Example:
      moeplan trace info traces --plot traces.html
    """
    from ...traces.count_form import CountTrace, open_any
    from ...traces.statistics import describe, describe_counts
    from ..report.trace import statistics_json, trace_report
    from ..report.trace_picture import write_trace_page

    opened = open_any(trace)
    with progress() as say:
        say("reading the trace")
        if isinstance(opened, CountTrace):
            found = describe_counts(opened, seed=seed)
        else:
            found = describe(opened, coactivation=plot is not None, seed=seed)
        if plot is not None:
            say("drawing")
            write_trace_page(opened, found, plot)
    if as_json:
        print_json(statistics_json(opened, found))
    else:
        trace_report(opened, found, console())
        if plot is not None:
            print(f"wrote     {plot}")
