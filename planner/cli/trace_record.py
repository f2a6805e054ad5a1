"""`moeplan trace record`: record the routing of a model on text."""

from pathlib import Path
from typing import Annotated

import typer

from ...errors import UsageError
from .screen import Json, print_json, progress

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
MAX_TEXT_BYTES = 64 * 2**20


@app.command()
def record(
    model: Annotated[str, typer.Argument(help="The model: embedded.")],
    text: Annotated[Path, typer.Option(help="The text to run it on, UTF-8.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the trace goes.")] = Path("traces"),
    sample_tokens: Annotated[int, typer.Option(help="Tokens of a sample.")] = 128,
    weights: Annotated[bool, typer.Option("--weights", help="Record gate weights too.")] = False,
    as_json: Json = False,
) -> None:
    """Record which experts the tokens of a text go to. No token ids are recorded.

    \b
    Example:
      moeplan trace record embedded --text book.txt -o traces
    """
    from ...files import read_text
    from ..demo.record import MODEL_NAME, record_embedded

    if model != MODEL_NAME:
        raise UsageError(f"model {model!r}; expected {MODEL_NAME}, the small model that moeplan carries")
    content = read_text(text, what="a text", max_bytes=MAX_TEXT_BYTES)
    with progress() as say:
        say(f"recording {model} on {text}")
        trace = record_embedded(content, output, sample_tokens=sample_tokens, weights=weights)
    if as_json:
        print_json({"trace": str(output), "num_tokens": trace.num_tokens, "model": trace.model.name})
    else:
        print(f"recorded  {trace.num_tokens:,} tokens of {text} through {trace.model.name}")
        print(f"wrote     {output}    next: moeplan solve --strategy exflow --trace {output} --cluster 1x4")
