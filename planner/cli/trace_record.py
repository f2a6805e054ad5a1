"""`moeplan trace record`: record the routing of a model on text."""

from pathlib import Path
from typing import Annotated

import typer

from ...errors import InputError, UsageError
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
    from ..demo.record import MODEL_NAME, record_embedded

    if model != MODEL_NAME:
        raise UsageError(f"model {model!r}; expected {MODEL_NAME}, the small model that moeplan carries")
    with progress() as say:
        say(f"recording {model} on {text}")
        trace = record_embedded(_read(text), output, sample_tokens=sample_tokens, weights=weights)
    if as_json:
        print_json({"trace": str(output), "num_tokens": trace.num_tokens, "model": trace.model.name})
    else:
        print(f"recorded  {trace.num_tokens:,} tokens of {text} through {trace.model.name}")
        print(f"wrote     {output}    next: moeplan solve --strategy exflow --trace {output} --cluster 1x4")


def _read(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > MAX_TEXT_BYTES:
            raise InputError(f"{path}: {size:,} bytes of text; expected at most {MAX_TEXT_BYTES:,}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from error
