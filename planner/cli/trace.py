"""`moeplan trace`: import, inspect and count routing; `record` stands in its own module."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import UsageError
from ..request import Phase
from .commands import LazyGroup
from .flags import Json, Phases, WorkersText, optional, phases
from .rules import Rule, check_flags
from .screen import console, print_json, progress

if TYPE_CHECKING:
    from ...traces.importers import ImportSummary

COMMANDS = {
    "record": "Record the routing of a model on text.",
    "import": "Turn a recording into a trace.",
    "info": "Print what a trace holds.",
    "count": "Reduce a token trace to counts.",
    "example": "Write a real trace that ships with moeplan.",
}

TWO_SHARDS = "--shard takes its share from srun, --shard-of {value} names it; give one of them"
RULES = (Rule(("--shard-of",), "with", ("--shard",), TWO_SHARDS),)
HERE = dict.fromkeys(("import", "info", "count", "example"), "trace")
trace = LazyGroup("trace", COMMANDS, HERE, help="Record, import, inspect and count routing traces.")


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
    workers: WorkersText = "auto",
    as_json: Json = False,
) -> None:
    """Turn a recording of an engine, or arrays, JSON lines or CSV of yours, into a trace.

    The kind is found by the content. With --hf-config config.json of the model: SGLang's
    expert_distribution_recorder_*.pt (stat, stat_approx, per_pass, per_token: the files of all ranks); responses of
    SGLang or vLLM with routed_experts, JSON lines; TensorRT-LLM's directory of meta_info.json and rank*.safetensors;
    Megatron-LM's directory of router_trace_rank*.jsonl, the only one whose lines --workers parses. Notes say what a
    recording cannot tell.

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
    from ...traces.count_form import open_any
    from ...traces.importers import import_trace
    from ...workers import opened

    with progress() as say, opened(workers) as there:
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
            workers=there,
        )
    written = open_any(summary.destination)
    step_order, has_ranks = written.meta.step_order if "step" in written.known else None, "source_rank" in written.known
    if as_json:
        result = {"trace": summary.destination, "model": summary.model.name, "num_tokens": summary.num_tokens}
        result |= {"num_samples": summary.num_samples, "step_order": step_order, "source_ranks": has_ranks}
        print_json(result | {"notes": list(summary.notes)})
        return
    order = {"known": "in their order", "unknown": "in no known order", None: "not recorded"}[step_order]
    where = f"{order}; source ranks {'recorded' if has_ranks else 'not recorded'}"
    _report_import(summary, where, is_guessed=not name and summary.model.name == source[0].resolve().stem)


def _report_import(summary: "ImportSummary", steps: str, *, is_guessed: bool) -> None:
    """Print an imported trace; `is_guessed`: its model is named after the file."""
    model, known = summary.model, {"tokens": summary.num_tokens, "samples": summary.num_samples}
    amounts = " of ".join(f"{number:,} {name}" for name, number in known.items() if number is not None)
    what = f"counts{amounts and f' of {amounts}'}" if summary.is_counts else amounts
    weights = ", with gate weights" if summary.has_weights else ""
    print(f"imported  {what}, {model.num_layers} layers x {model.num_experts} experts, top-{model.top_k}{weights}")
    print(f"model     {model.name}{', after the file; --name says another' if is_guessed else ''}")
    print(f"steps     {steps}")
    screen = console()
    for note in summary.notes:
        screen.print(f"note      {note}")
    print(f"wrote     {summary.destination}    next: moeplan trace info {summary.destination}")


def info(
    trace: Annotated[str, typer.Argument(help="The trace: a directory, a file or a URI.")] = "traces",
    plot: Annotated[Path | None, optional("Also draw it, as a page that needs no network.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the shuffles that give chance levels.", min=0)] = 0,
    workers: WorkersText = "auto",
    as_json: Json = False,
) -> None:
    """Print what a trace holds: tokens, samples, phases, and by layer skew, affinity to the next, and locality.

    A recording that looks like one of random tokens, which overstate skew, is named.

    \b
    Example:
      moeplan trace info traces --plot traces.html
    """
    from ...traces.count_form import CountTrace, open_any
    from ...traces.statistics import describe, describe_counts
    from ...workers import opened as opened_workers
    from ..report.trace import statistics_json, trace_report, write_trace_page

    opened = open_any(trace)
    with progress() as say, opened_workers(workers) as there:
        say("reading the trace")
        if isinstance(opened, CountTrace):
            statistics = describe_counts(opened, seed=seed, workers=there)
        else:
            statistics = describe(opened, coactivation=plot is not None, seed=seed, workers=there)
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
    trace: Annotated[str, typer.Argument(help="The trace: a directory, a file or a URI; or a directory of shards.")],
    output: Annotated[str, typer.Option("-o", "--output", help="Where the counts go: a directory.")],
    phase: Phases = None,
    workers: WorkersText = "auto",
    shard: Annotated[
        bool, typer.Option("--shard", help="Under srun: count this process's share, into a shard.")
    ] = False,
    shard_of: Annotated[str | None, optional("The same without srun: share K of N, from 0/N.", metavar="K/N")] = None,
    as_json: Json = False,
) -> None:
    """Reduce a trace to its count form: tokens per expert, by step, sample and source rank.

    Of a trace in count form, and of shards, it adds up the rows that agree in all of these.

    \b
    Example:
      moeplan trace count traces -o counts
      srun -n 64 moeplan trace count traces --shard -o shards
      moeplan trace count shards -o counts
    """
    from ...traces.count_form import CountTrace, condense, meta_of_counts, open_any, tabulate, write_counts
    from ...traces.reader import Trace
    from ...traces.shards import Shard, is_sharded, read_shards, write_shard
    from ...workers import opened as opened_workers

    check_flags({"--shard": shard, "--shard-of": shard_of}, RULES)
    chosen = Shard.parse(shard_of) if shard_of else Shard.of_slurm() if shard else None
    whole = None if is_sharded(trace) else open_any(trace)
    counts = read_shards(trace) if whole is None else [whole] if isinstance(whole, CountTrace) else []
    if counts and phase:
        raise UsageError(f"{trace}: counts do not say the phase of their tokens; leave --phase out")
    if counts and chosen:
        raise UsageError(f"{trace}: counts already; expected a trace of tokens, or no --shard")
    with progress() as say, opened_workers(workers) as there:
        say("counting")
        if not isinstance(whole, Trace):
            meta = counts[0].meta if whole is None else meta_of_counts(whole)
            parts = write_counts(output, meta, condense(*counts, workers=there))
            num_rows = sum(one.num_rows for one in counts)
        elif chosen is None:
            tables = tabulate(whole, phases=phases(phase) or None, workers=there)
            parts, num_rows = write_counts(output, meta_of_counts(whole), tables), whole.num_rows
        else:
            part, parts = write_shard(whole, chosen, output, phases=phases(phase) or None, workers=there)
            num_rows = part.num_rows
    keys = sorted((whole or counts[0]).known)
    if as_json:
        print_json({"counts": output, "parts": len(parts), "by": keys})
        return
    what = "rows of counts" if counts else "tokens"
    by = f"by {', '.join(keys) or 'layer only'}"
    elsewhere = "; each file is counted whole, by another process" * (chosen is not None and not num_rows)
    if phase:
        print(f"read      {num_rows:,} {what}, counted those of {' and '.join(phase)} {by}{elsewhere}")
    else:
        print(f"counted   {num_rows:,} {what} {by}{elsewhere}")
    if chosen is None:
        print(f"wrote     {output}    next: moeplan solve --trace {output}")
    else:
        print(f"wrote     {output}    once all {chosen.count} shards are there: moeplan trace count {output} -o counts")


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
