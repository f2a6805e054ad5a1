"""`moeplan trace record`: record the routing of a model on text."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import UsageError
from .screen import Json, print_json, progress

if TYPE_CHECKING:
    from ...traces.huggingface.prompts import Prompts

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
    kept: dict[str, Any] = {"weights": weights, "sample_rate": sample_rate, "max_tokens": max_tokens}
    kept["embeddings"] = embeddings
    run: dict[str, Any] = {"generate": generate, "router": router, "batch_samples": batch_samples}
    interrupted, num_empty = False, 0
    with progress(lines=True) as say:
        if model == EMBEDDED:
            from ..demo.record import record_embedded

            if dataset is not None or (*run.values(), dtype, device) != (0, None, 8, "auto", "auto"):
                raise UsageError(
                    "embedded takes --text and none of --dataset, --generate, --router, --dtype, --device and"
                    " --batch-samples; they are for the directory of a Hugging Face model"
                )
            say("recording the embedded model")
            trace = record_embedded(_content(text), output, sample_tokens=sample_tokens, **kept)
            name, num_tokens = trace.model.name, trace.num_tokens
        else:
            from ...traces.huggingface.checkpoint import load_model
            from ...traces.huggingface.record import record_model

            directory = _model_directory(model)
            prompts, tokenizer = _prompts(directory, text, dataset, sample_tokens)
            say(f"loading {directory}")
            loaded = load_model(directory, dtype=dtype, device=device)
            name = directory.resolve().name
            done = record_model(
                loaded, prompts.samples, output, name=name, tokenizer=tokenizer, on_progress=say, **kept, **run
            )
            num_tokens, interrupted, num_empty = done.num_tokens, done.interrupted, prompts.num_empty
    if as_json:
        print_json({"trace": str(output), "num_tokens": num_tokens, "model": name, "num_empty": num_empty})
    elif num_tokens:
        print(f"recorded  {num_tokens:,} tokens of {text or dataset} through {name}")
        if num_empty:
            print(f"skipped   {num_empty:,} empty prompt(s) of {dataset}")
        print(f"wrote     {output}    next: moeplan solve --strategy exflow --trace {output} --cluster 1x4")
    if interrupted:
        print(f"moeplan: interrupted; {num_tokens:,} tokens were recorded until then", file=sys.stderr)
        raise typer.Exit(130)


def _model_directory(model: str) -> Path:
    if not Path(model).is_dir():
        raise UsageError(f"model {model!r}; expected {EMBEDDED}, or the directory of a Hugging Face model")
    return Path(model)


def _prompts(directory: Path, text: Path | None, dataset: Path | None, sample_tokens: int) -> "tuple[Prompts, str]":
    """The samples as token ids, and what the trace says of the tokenizer."""
    from ...traces.huggingface.checkpoint import load_tokenizer, tokenizer_label
    from ...traces.huggingface.prompts import Prompts, dataset_prompts, text_prompts

    if (text is None) == (dataset is None):
        raise UsageError("expected either --text FILE or --dataset FILE.jsonl")
    content = _content(text) if dataset is None else ""
    tokenizer = load_tokenizer(directory)
    label = tokenizer_label(directory, tokenizer)
    if dataset is not None:
        return dataset_prompts(dataset, tokenizer), label
    return Prompts(text_prompts(content, tokenizer, sample_tokens)), label


def _content(text: Path | None) -> str:
    from ...files import read_text

    if text is None:
        raise UsageError("expected --text FILE")
    return read_text(text, what="a text", max_bytes=MAX_TEXT_BYTES)
