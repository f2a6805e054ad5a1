"""`moeplan trace record`: record the routing of a model on text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ...errors import UsageError
from .flags import Json, optional
from .rules import Rule, check_flags
from .screen import end_interrupted, print_json, progress

if TYPE_CHECKING:
    from ...traces.huggingface.prompts import Prompts

EMBEDDED = "embedded"
MAX_TEXT_BYTES = 64 * 2**20
BATCH_SAMPLES = 8
NO_TEXT = "nothing to run the model on; give --text FILE, or --dataset FILE.jsonl"
FOREIGN = "embedded does not take {flag}, which is for the directory of a Hugging Face model; leave it out"
FOR_DIRECTORIES = ("--dataset", "--generate", "--router", "--dtype", "--device", "--batch-samples")
RULES = (
    Rule(FOR_DIRECTORIES, "with", (EMBEDDED,), FOREIGN),
    Rule((EMBEDDED,), "without", ("--text",), "expected --text FILE"),
    Rule(("--text",), "with", ("--dataset",), "--text and --dataset are both given; leave one out"),
    Rule(("MODEL",), "without", ("--text", "--dataset"), NO_TEXT),
)


def record(
    model: Annotated[str, typer.Argument(help="embedded, or the directory of a Hugging Face MoE model.")],
    text: Annotated[Path | None, optional("The text to run it on, UTF-8, cut into samples.")] = None,
    dataset: Annotated[Path | None, optional("JSON lines with text, prompt or messages instead.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the trace goes.")] = Path("traces"),
    sample_tokens: Annotated[int, typer.Option(help="Tokens per sample of the text.")] = 128,
    generate: Annotated[int, typer.Option(min=0, help="Tokens to decode greedily after each sample.")] = 0,
    router: Annotated[str | None, optional("Regular expression for the names of the routers.")] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Record gate weights too.")] = False,
    sample_rate: Annotated[float, typer.Option(help="Share of the samples, chosen by hash.")] = 1.0,
    max_tokens: Annotated[int | None, optional("Tokens to stop after.")] = None,
    embeddings: Annotated[str, optional("Layers whose inputs are kept: all, or as 0,5.")] = "",
    dtype: Annotated[str, typer.Option(help="auto: the checkpoint's; or float32, bfloat16, float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto: CUDA where there is one; or cpu, cuda.")] = "auto",
    batch_samples: Annotated[int, typer.Option(min=1, help="Samples run at a time.")] = BATCH_SAMPLES,
    as_json: Json = False,
) -> None:
    """Record which experts the tokens of a text go to. No token ids are recorded.

    Nothing is downloaded, and no code out of a model's directory is run.

    \b
    Example:
      moeplan trace record embedded --text book.txt -o traces
      moeplan trace record ./OLMoE-1B-7B --dataset prompts.jsonl --generate 64
    """
    given: dict[str, object] = {EMBEDDED: model == EMBEDDED, "MODEL": model != EMBEDDED, "--text": text}
    given |= {"--dataset": dataset, "--generate": generate > 0, "--router": router, "--dtype": dtype != "auto"}
    given |= {"--device": device != "auto", "--batch-samples": batch_samples != BATCH_SAMPLES}
    check_flags(given, RULES)
    kept: dict[str, Any] = {"weights": weights, "sample_rate": sample_rate, "max_tokens": max_tokens}
    kept["embeddings"] = embeddings
    with progress() as say:
        if model == EMBEDDED:
            from ..demo.text import record_embedded

            say("recording the embedded model")
            trace = record_embedded(_content(text), output, sample_tokens=sample_tokens, **kept)
            done = Recorded(trace.num_tokens, trace.model.name)
        else:
            from ...traces.huggingface.checkpoint import load_model
            from ...traces.huggingface.record import record_model

            directory = Path(model)
            if not directory.is_dir():
                raise UsageError(f"model {model!r}; expected {EMBEDDED}, or the directory of a Hugging Face model")
            prompts, tokenizer = _prompts(directory, text, dataset, sample_tokens)
            say(f"loading {directory}")
            loaded, name = load_model(directory, dtype=dtype, device=device), directory.resolve().name
            kept |= {"generate": generate, "router": router, "batch_samples": batch_samples, "on_progress": say}
            run = record_model(loaded, prompts.samples, output, name=name, tokenizer=tokenizer, **kept)
            done = Recorded(run.num_tokens, name, prompts.num_empty, run.interrupted)
    _report(done, output, f"{text or dataset}", as_json=as_json)


class Recorded(NamedTuple):
    """Amounts of a recording."""

    num_tokens: int
    model: str
    num_empty: int = 0  #: Prompts without a token
    interrupted: bool = False


def _report(done: Recorded, output: Path, source: str, *, as_json: bool) -> None:
    """Print a recording; ends as Ctrl-C does where that ended it."""
    if as_json:
        result = {"trace": str(output), "num_tokens": done.num_tokens, "model": done.model}
        print_json(result | {"num_empty": done.num_empty})
    elif done.num_tokens:
        print(f"recorded  {done.num_tokens:,} tokens of {source} through {done.model}")
        if done.num_empty:
            print(f"skipped   {done.num_empty:,} empty prompt(s) of {source}")
        print(f"wrote     {output}    next: moeplan solve --trace {output} --cluster 1x4")
    if done.interrupted:
        end_interrupted(f"{done.num_tokens:,} tokens were recorded until then")


def _prompts(directory: Path, text: Path | None, dataset: Path | None, sample_tokens: int) -> "tuple[Prompts, str]":
    """The samples as token ids, and what the trace says of the tokenizer."""
    from ...traces.huggingface.checkpoint import load_tokenizer, tokenizer_label
    from ...traces.huggingface.prompts import Prompts, dataset_prompts, text_prompts

    content = _content(text) if dataset is None else ""
    tokenizer = load_tokenizer(directory)
    label = tokenizer_label(directory, tokenizer)
    if dataset is not None:
        return dataset_prompts(dataset, tokenizer), label
    return Prompts(text_prompts(content, tokenizer, sample_tokens)), label


def _content(text: Path | None) -> str:
    from ...files import read_text

    assert text is not None  # else a rule is broken
    return read_text(text, what="a text", max_bytes=MAX_TEXT_BYTES)
