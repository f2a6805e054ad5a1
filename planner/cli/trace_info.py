"""`moeplan trace info`: say what is in a trace."""

from typing import Annotated

import typer

from .screen import Json, console, print_json, progress

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def info(
    trace: Annotated[str, typer.Argument(help="The trace: a directory, a file or a URI.")] = "traces",
    as_json: Json = False,
) -> None:
    """Say what is in a trace: tokens, samples, phases, skew of every layer, affinity between layers.

    \b
    Example:
      moeplan trace info traces
    """
    from ...traces.reader import open_trace
    from ...traces.statistics import describe
    from ..trace_report import statistics_json, trace_report

    opened = open_trace(trace)
    with progress() as say:
        say("reading the trace")
        found = describe(opened)
    if as_json:
        print_json(statistics_json(opened, found))
    else:
        trace_report(opened, found, console())
