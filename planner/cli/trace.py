"""`moeplan trace`: record, import, inspect and count routing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ...errors import UsageError
from ..request import Phase
from .commands import LazyGroup
from .flags import Json, Phases, optional, phases
from .rules import Rule, check_flags
from .screen import console, end_interrupted, print_json, progress

if TYPE_CHECKING:
    from ...traces.huggingface.prompts import Prompts
    from ...traces.importers import ImportSummary

EMBEDDED = "embedded"
MAX_TEXT_BYTES = 64 * 2**20
BATCH_SAMPLES = 8
NO_TEXT = "nothing to run the model on; give --text FILE, or --dataset FILE.jsonl"
FOREIGN = "embedded does not take {flag}, which is for the directory of a Hugging Face model; leave it out"
FOR_DIRECTORIES = ("--dataset", "--generate", "--router", "--dtype", "--device", "--batch-samples")
RULES = (  # of record
    Rule(FOR_DIRECTORIES, "with", (EMBEDDED,), FOREIGN),
    Rule((EMBEDDED,), "without", ("--text",), "expected --text FILE"),
    Rule(("--text",), "with", ("--dataset",), "--text and --dataset are both given; leave one out"),
    Rule(("MODEL",), "without", ("--text", "--dataset"), NO_TEXT),
)
COMMANDS = {
    "record": "Record the routing of a model on text.",
    "import": "Turn a recording into a trace.",
    "info": "Print what a trace holds.",
    "count": "Reduce a token trace to counts.",
    "example": "Write a real trace that ships with moeplan.",
}

trace = LazyGroup(
    "trace", COMMANDS, dict.fromkeys(COMMANDS, "trace"), help="Record, import, inspect and count routing traces."
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
    with progress(lines=True) as say:
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


def import_(
    source: Annotated[
        list[Path], typer.Argument(help="The recording: a file, files or a directory; see below.", show_default=False)
    ],
    output: Annotated[str, typer.Option("-o", "--output", help="Where the trace goes.")] = "traces",
    hf_config: Annotated[Path | None, optional("The model's config.json, which says what files do not.")] = None,
    first_step: Annotated[int | None, optional("Leave out the steps before it, the warm-up.", min=0)] = None,
    num_experts: Annotated[int | None, optional("Experts per layer, where the file does not say.", min=1)] = None,
    top_k: Annotated[int | None, optional("Experts per token, where the file does not say.", min=1)] = None,
    name: Annotated[str | None, optional("The model's name; else the file's.")] = None,
    phase: Annotated[Phase, typer.Option(help="The phase of the tokens, where the file does not say.")] = "decode",
    hidden_size: Annotated[int | None, optional("The model's hidden size, to predict bytes.", min=1)] = None,
    ffn_size: Annotated[int | None, optional("An expert's FFN size, to predict seconds.", min=1)] = None,
    kv_size: Annotated[int | None, optional("Elements of K and V per token and layer.", min=1)] = None,
    dtype_bytes: Annotated[int | None, optional("Bytes of an element, e.g. 2 for bf16.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Turn a recording of an engine, or arrays, JSON lines or CSV of yours, into a trace.

    The kind is found by the content. With --hf-config config.json of the model: SGLang's
    expert_distribution_recorder_*.pt (stat, stat_approx, per_pass, per_token: the files of all ranks); responses of
    SGLang or vLLM with routed_experts, JSON lines; TensorRT-LLM's directory of meta_info.json and rank*.safetensors;
    Megatron-LM's directory of router_trace_rank*.jsonl. Notes say what a recording cannot tell.

    An .npz holds expert_ids [tokens, layers, k] with optional weights, seq_id, pos and num_experts. An .npy is
    [tokens, layers] (ExFlow's) or [tokens, layers, k].

    An .npz without expert_ids holds counts [samples, layers, experts], with n_tokens [samples] if known. Or it holds
    counts [steps, source ranks, layers, micro-batches, experts] with iteration [steps], every micro-batch a sample.

    JSON lines have one object per token, {"sample": 7, "position": 0, "experts": [[3, 1], [0, 2]]}, with optional
    weights in the shape of experts, step, source_rank and phase. Or one per token and layer, {"sample": 7,
    "position": 0, "layer": 12, "experts": [3, 1]}. The first line may be {"model": {"num_experts": 8, ...}}.

    CSV has the columns layer, expert and count, and optionally step, sample and source_rank: a trace of counts.

    \b
    Example:
      moeplan trace import /tmp/expert_distribution_recorder_*.pt \\
        --hf-config DeepSeek-V3/config.json -o traces
      moeplan trace import responses.jsonl --hf-config config.json -o traces
      moeplan trace import routing.npz --hidden-size 2880 --ffn-size 2880 \\
        --kv-size 1024 --dtype-bytes 2 -o traces
    """
    from ...traces.importers import import_trace

    with progress() as say:
        say(f"importing {source[0]}")
        summary = import_trace(
            source,
            output,
            hf_config=hf_config,
            first_step=first_step,
            num_experts=num_experts,
            top_k=top_k,
            name=name,
            phase=phase,
            hidden_size=hidden_size,
            ffn_size=ffn_size,
            kv_size=kv_size,
            dtype_bytes=dtype_bytes,
        )
    if as_json:
        result = {"trace": summary.destination, "model": summary.model.name, "num_tokens": summary.num_tokens}
        print_json(result | {"num_samples": summary.num_samples, "notes": list(summary.notes)})
        return
    _report_import(summary, is_guessed=not name and summary.model.name == source[0].resolve().stem)


def _report_import(summary: "ImportSummary", *, is_guessed: bool) -> None:
    """Print an imported trace; `is_guessed`: its model is named after the file."""
    model, known = summary.model, {"tokens": summary.num_tokens, "samples": summary.num_samples}
    amounts = " of ".join(f"{number:,} {name}" for name, number in known.items() if number is not None)
    what = f"counts{amounts and f' of {amounts}'}" if summary.is_counts else amounts
    weights = ", with gate weights" if summary.has_weights else ""
    print(f"imported  {what}, {model.num_layers} layers x {model.num_experts} experts, top-{model.top_k}{weights}")
    print(f"model     {model.name}{', after the file; --name says another' if is_guessed else ''}")
    screen = console()
    for note in summary.notes:
        screen.print(f"note      {note}")
    print(f"wrote     {summary.destination}    next: moeplan trace info {summary.destination}")


def info(
    trace: Annotated[str, typer.Argument(help="The trace: a directory, a file or a URI.")] = "traces",
    plot: Annotated[Path | None, optional("Also draw it, as a page that needs no network.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the shuffles that give chance levels.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Print what a trace holds: tokens, samples, phases, and by layer skew, affinity to the next, and locality.

    \b
    Example:
      moeplan trace info traces --plot traces.html
    """
    from ...traces.count_form import CountTrace, open_any
    from ...traces.statistics import describe, describe_counts
    from ..report.trace import statistics_json, trace_report, write_trace_page

    opened = open_any(trace)
    with progress() as say:
        say("reading the trace")
        if isinstance(opened, CountTrace):
            statistics = describe_counts(opened, seed=seed)
        else:
            statistics = describe(opened, coactivation=plot is not None, seed=seed)
        if plot is not None:
            say("drawing")
            write_trace_page(opened, statistics, plot)
    if as_json:
        print_json(statistics_json(opened, statistics))
    else:
        trace_report(opened, statistics, console())
        if plot is not None:
            print(f"wrote     {plot}")


def count(
    trace: Annotated[str, typer.Argument(help="The trace: a directory, a file or a URI.")],
    output: Annotated[str, typer.Option("-o", "--output", help="Where the counts go: a directory.")],
    phase: Phases = None,
    as_json: Json = False,
) -> None:
    """Reduce a trace to its count form: tokens per expert, by step, sample and source rank.

    Of a trace in count form it adds up the rows that agree in all of these.

    \b
    Example:
      moeplan trace count traces -o counts
    """
    from ...traces.count_form import CountTrace, condense, open_any, tabulate, write_counts
    from ...traces.model import MAX_NAME

    opened = open_any(trace)
    if isinstance(opened, CountTrace) and phase:
        raise UsageError(f"{trace}: counts do not say the phase of their tokens; leave --phase out")
    with progress() as say:
        say("counting")
        recorder = f"count of {opened.meta.recorder}"[:MAX_NAME]
        meta = opened.meta.model_copy(update={"form": "counts", "recorder": recorder})
        tables = condense(opened) if isinstance(opened, CountTrace) else tabulate(opened, phases=phases(phase) or None)
        parts = write_counts(output, meta, tables)
    keys = sorted(opened.known)
    if as_json:
        print_json({"counts": output, "parts": len(parts), "by": keys})
    else:
        rows = "rows of counts" if isinstance(opened, CountTrace) else "tokens"
        print(f"counted   {opened.num_rows:,} {rows} by {', '.join(keys) or 'layer only'}")
        print(f"wrote     {output}    next: moeplan solve --trace {output}")


def example(
    name: Annotated[str, typer.Argument(help="The example; list prints the names.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the trace goes.")] = Path("traces"),
    as_json: Json = False,
) -> None:
    """Write a real trace that ships with moeplan.

    gpt-oss-20b: 140 sequences of MMLU and GPQA that OpenAI's model generated, 24 layers x 32 experts, top-4.

    \b
    Example:
      moeplan trace example gpt-oss-20b -o traces
    """
    from ...traces.examples import CLUSTER, EXAMPLES, NOTES, write_example

    if name == "list":
        print_json({"examples": list(EXAMPLES)}) if as_json else print(", ".join(EXAMPLES))
        return
    trace = write_example(name, output)
    if as_json:
        print_json({"trace": str(output), "num_tokens": trace.num_tokens, "model": trace.model.name})
    else:
        print(f"example   {trace.num_tokens:,} tokens of {trace.model.name}, a real recording")
        if note := NOTES.get(name):
            print(f"note      {note}")
        print(f"wrote     {output}    next: moeplan profile --preset h200_sxm --cluster {CLUSTER} --link inter=50:5")
