"""`moeplan trace import`: turn a foreign recording into a trace."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Phase
from .screen import Json, print_json, progress

if TYPE_CHECKING:
    from ...traces.importers import ImportSummary

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("import")
def import_(
    source: Annotated[
        list[Path], typer.Argument(help="The recording: a file, files or a directory; see below.", show_default=False)
    ],
    output: Annotated[str, typer.Option("-o", "--output", help="Where the trace goes.")] = "traces",
    hf_config: Annotated[
        Path | None, typer.Option(help="The model's config.json, which says what files do not.", show_default=False)
    ] = None,
    first_step: Annotated[
        int | None, typer.Option(help="Leave out the steps before it, the warm-up.", min=0, show_default=False)
    ] = None,
    num_experts: Annotated[
        int | None, typer.Option(help="Experts a layer, where the file does not say.", min=1, show_default=False)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Experts a token, where the file does not say.", min=1, show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's name; the file's.", show_default=False)] = None,
    phase: Annotated[Phase, typer.Option(help="The phase of tokens that the file does not say it of.")] = Phase.DECODE,
    hidden_size: Annotated[
        int | None, typer.Option(help="The model's hidden size, to predict bytes.", min=1, show_default=False)
    ] = None,
    ffn_size: Annotated[
        int | None, typer.Option(help="An expert's FFN size, to predict seconds.", min=1, show_default=False)
    ] = None,
    kv_size: Annotated[
        int | None, typer.Option(help="Elements of K and V, a token and layer.", min=1, show_default=False)
    ] = None,
    dtype_bytes: Annotated[
        int | None, typer.Option(help="Bytes of an element, e.g. 2 for bf16.", min=1, show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn a foreign recording into a trace; which kind it is, is seen from its content.

    Engines, with --hf-config config.json of the model they ran: SGLang's expert_distribution_recorder_*.pt (stat,
    stat_approx, per_pass, per_token: give the files of all ranks); responses of SGLang or vLLM with routed_experts,
    JSON lines; TensorRT-LLM's directory of meta_info.json and rank*.safetensors; Megatron-LM's directory of
    router_trace_rank*.jsonl. What a recording cannot tell (requests, order, tokens) is noted.

    An .npz holds expert_ids [tokens, layers, k] with optional weights, seq_id, pos and num_experts; an .npy is
    [tokens, layers] (ExFlow's) or [tokens, layers, k].

    An .npz without expert_ids holds counts [samples, layers, experts], with n_tokens [samples] if known; or counts
    [steps, source ranks, layers, micro-batches, experts] with iteration [steps], every micro-batch a sample.

    JSON lines have an object a token, {"sample": 7, "position": 0, "experts": [[3, 1], [0, 2]]}, with optional
    weights in the shape of experts, step, source_rank and phase; or an object a token and layer, {"sample": 7,
    "position": 0, "layer": 12, "experts": [3, 1]}. The first line may be {"model": {"num_experts": 8, ...}}.

    CSV has the columns layer, expert and count, and if there step, sample and source_rank: a trace of counts.

    \b
    Example:
      moeplan trace import routing.npz -o traces --hidden-size 2880 --ffn-size 2880 --kv-size 1024 --dtype-bytes 2
      moeplan trace import /tmp/expert_distribution_recorder_*.pt -o traces --hf-config DeepSeek-V3/config.json
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
            phase=phase.value,
            hidden_size=hidden_size,
            ffn_size=ffn_size,
            kv_size=kv_size,
            dtype_bytes=dtype_bytes,
        )
    if as_json:
        told = {"trace": summary.destination, "model": summary.model.name, "num_tokens": summary.num_tokens}
        print_json(told | {"num_samples": summary.num_samples, "notes": list(summary.notes)})
        return
    model = summary.model
    print(
        f"imported  {_what(summary)}, {model.num_layers} layers x {model.num_experts} experts,"
        f" top-{model.top_k}{', with gate weights' if summary.has_weights else ''}"
    )
    is_guessed = not name and model.name == source[0].resolve().stem
    print(f"model     {model.name}{', after the file; --name says another' if is_guessed else ''}")
    for note in summary.notes:
        print(f"note      {note}")
    print(f"wrote     {summary.destination}    next: moeplan trace info {summary.destination}")


def _what(summary: "ImportSummary") -> str:
    """How much was imported, of what is known."""
    known = {"tokens": summary.num_tokens, "samples": summary.num_samples}
    amounts = " of ".join(f"{number:,} {name}" for name, number in known.items() if number is not None)
    return f"counts{amounts and f' of {amounts}'}" if summary.is_counts else amounts
