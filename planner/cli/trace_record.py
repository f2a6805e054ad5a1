"""`moeplan trace record`: record the routing of a model on text."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import UsageError
from .screen import Json, print_json, progress

if TYPE_CHECKING:
    from ...traces.huggingface.record import Recording

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
EMBEDDED = "embedded"
MAX_TEXT_BYTES = 64 * 2**20


@app.command()
def record(
    model: Annotated[str, typer.Argument(help="embedded, or the directory of a Hugging Face MoE model.")],
    text: Annotated[
        Path | None, typer.Option(help="The text to run it on, UTF-8, cut into samples.", show_default=False)
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="JSON lines with text, prompt or messages instead.", show_default=False)
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the trace goes.")] = Path("traces"),
    sample_tokens: Annotated[int, typer.Option(help="Tokens of a sample of the text.")] = 128,
    generate: Annotated[int, typer.Option(min=0, help="Tokens to decode greedily after each sample.")] = 0,
    router: Annotated[
        str | None, typer.Option(help="Regular expression for the names of the routers.", show_default=False)
    ] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Record gate weights too.")] = False,
    sample_rate: Annotated[float, typer.Option(help="Share of the samples, chosen by hash.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to stop after.", show_default=False)] = None,
    embeddings: Annotated[
        str, typer.Option(help="Layers whose inputs are kept: all, or as 0,5.", show_default=False)
    ] = "",
    dtype: Annotated[str, typer.Option(help="auto: the checkpoint's; or float32, bfloat16, float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto: CUDA where there is one; or cpu, cuda.")] = "auto",
    batch_samples: Annotated[int, typer.Option(min=1, help="Samples run at a time.")] = 8,
    as_json: Json = False,
) -> None:
    """Record which experts the tokens of a text go to. No token ids are recorded.

    Nothing is downloaded, and no code out of a model's directory is run.

    \b
    Example:
      moeplan trace record embedded --text book.txt -o traces
      moeplan trace record ./OLMoE-1B-7B --dataset prompts.jsonl --generate 64 -o traces
    """
    kept = {"weights": weights, "sample_rate": sample_rate, "max_tokens": max_tokens, "embeddings": embeddings}
    run = {"generate": generate, "router": router, "batch_samples": batch_samples}
    with progress() as say:
        if model == EMBEDDED:
            if dataset is not None or (*run.values(), dtype, device) != (0, None, 8, "auto", "auto"):
                raise UsageError(
                    "embedded takes --text and none of --dataset, --generate, --router, --dtype, --device and"
                    " --batch-samples; they are for the directory of a Hugging Face model"
                )
            found = _embedded(_content(text), output, say, sample_tokens=sample_tokens, **kept)
        else:
            found = _directory(Path(model), (text, dataset, sample_tokens), (dtype, device), output, say, **kept, **run)
    source = text or dataset
    if as_json:
        print_json({"trace": str(output), "num_tokens": found.num_tokens, "model": found.spec.name})
    elif found.num_tokens:
        print(f"recorded  {found.num_tokens:,} tokens of {source} through {found.spec.name}")
        print(f"wrote     {output}    next: moeplan solve --strategy exflow --trace {output} --cluster 1x4")
    if found.interrupted:
        print(f"moeplan: interrupted; {found.num_tokens:,} tokens were recorded until then", file=sys.stderr)
        raise typer.Exit(130)


def _embedded(content: str, output: Path, say: Callable[[str], None], **options: Any) -> "Recording":
    from ...traces.huggingface.record import Recording
    from ..demo.record import record_embedded

    say("recording the embedded model")
    trace = record_embedded(content, output, **options)
    return Recording(trace.model, trace.num_tokens, interrupted=False)


def _directory(
    directory: Path,
    source: tuple[Path | None, Path | None, int],
    load: tuple[str, str],
    output: Path,
    say: Callable[[str], None],
    **options: Any,
) -> "Recording":
    from ...traces.huggingface.checkpoint import load_model, load_tokenizer, tokenizer_label
    from ...traces.huggingface.prompts import dataset_prompts, text_prompts
    from ...traces.huggingface.record import record_model

    text, dataset, sample_tokens = source
    if not directory.is_dir():
        raise UsageError(f"model {str(directory)!r}; expected {EMBEDDED}, or the directory of a Hugging Face model")
    if (text is None) == (dataset is None):
        raise UsageError("expected either --text FILE or --dataset FILE.jsonl")
    content = None if text is None else _content(text)
    tokenizer = load_tokenizer(directory)
    if dataset is not None:
        prompts = dataset_prompts(dataset, tokenizer)
    else:
        prompts = text_prompts(content or "", tokenizer, sample_tokens)
    say(f"loading {directory}")
    model = load_model(directory, dtype=load[0], device=load[1])
    label = tokenizer_label(directory, tokenizer)
    return record_model(
        model, prompts, output, name=directory.resolve().name, tokenizer=label, on_progress=say, **options
    )


def _content(text: Path | None) -> str:
    from ...files import read_text

    if text is None:
        raise UsageError("expected --text FILE")
    return read_text(text, what="a text", max_bytes=MAX_TEXT_BYTES)
