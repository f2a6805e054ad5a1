"""Screen of `moeplan trace info`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...traces.count_form import CountTrace
from ...traces.information import Information
from ...traces.reader import Trace
from ...traces.statistics import Statistics, TokenStatistics

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["statistics_json", "trace_report"]

BAR = 10


def trace_report(trace: Trace | CountTrace, found: Statistics, console: "Console") -> None:
    """How much of what there is and is not, and a line a layer."""
    model = trace.meta.model
    limit = f" within {model.top_k_groups} of {model.num_expert_groups} groups" if model.top_k_groups else ""
    console.print(
        f"model     {model.name}: {model.num_layers} MoE layers x {model.num_experts} experts, top-{model.top_k}"
        f"{limit}; recorded by {trace.meta.recorder}"
    )
    for line in (*_contents(trace, found), *_picture(found, model.layer_ids)):
        console.print(line)


def statistics_json(trace: Trace | CountTrace, found: Statistics) -> dict[str, Any]:
    """The same as a JSON object; null is what the trace does not tell."""
    tokens, local = found.tokens, found.locality
    return {
        "path": str(trace.path),
        "sha256": trace.sha256,
        "form": trace.form,
        "model": trace.meta.model_dump(mode="json")["model"],
        "files": list(trace.files),
        "unfinished": list(trace.unfinished),
        "num_rows": trace.num_rows,
        "num_tokens": tokens and tokens.counts.num_tokens,
        "num_samples": found.num_samples,
        "num_steps": found.num_steps,
        "num_source_ranks": found.num_source_ranks,
        "has_weights": trace.has_weights,
        "phase_tokens": tokens and dict(tokens.phase_tokens),
        "cells": tokens and tokens.cells,
        "not_routed": tokens and tokens.not_routed,
        "skew": found.skew.tolist(),
        "affinity": tokens and tokens.affinity.tolist(),
        "chance": tokens and tokens.chance.tolist(),
        "affinity_information": tokens and _information_json(tokens.information),
        "locality": local and local.index.tolist(),
        "locality_samples": local and local.num_samples,
        "locality_information": local and _information_json(local.information),
        "seed": found.seed,
    }


def _contents(trace: Trace | CountTrace, found: Statistics) -> Iterator[str]:
    tokens, parts = found.tokens, f"in {len(trace.files)} file(s)"
    if tokens is None:
        yield f"counts    {trace.num_rows:,} rows, {found.loads.sum():,} token-expert pairs {parts}"
        yield "not there phases, transitions, co-activation and what was not routed"
    else:
        phases = ", ".join(f"{phase} {number:,}" for phase, number in tokens.phase_tokens.items())
        yield f"tokens    {tokens.counts.num_tokens:,} ({phases}) {parts}"
    for name, number in (
        ("samples", found.num_samples),
        ("steps", found.num_steps),
        ("ranks", found.num_source_ranks),
    ):
        yield f"{name:<9} {'not recorded' if number is None else f'{number:,}'}"
    if tokens is not None:
        yield f"weights   {'recorded' if trace.has_weights else 'not recorded'}"
        yield f"cells     {tokens.cells:,}, {tokens.not_routed:,} not routed ({tokens.not_routed / tokens.cells:.1%})"
    if trace.unfinished:
        yield f"skipped   {len(trace.unfinished)} unfinished part(s): {', '.join(trace.unfinished)}"


def _picture(found: Statistics, layer_ids: Sequence[int]) -> Iterator[str]:
    """A line a layer: its number, the skew, what it tells of the next layer, the locality of samples.

    Its hidden layer too, where those are not the ordinals.
    """
    tokens, local = found.tokens, found.locality
    widest, differ = max(found.skew.max(), 1.0), [*layer_ids] != [*range(len(layer_ids))]
    yield ""
    yield (
        f"layer{' hidden' if differ else ''}  {'load max/mean':<{BAR + 6}}"
        + ("  next known by chance    bits by chance" if tokens else "")
        + ("  locality" if local else "")
    )
    for layer, skew in enumerate(found.skew.tolist()):
        hidden = f"{layer_ids[layer]:>7}" if differ else ""
        line = f"{layer:>5}{hidden}  {skew:5.2f} {_bar(skew / widest)}"
        if tokens:
            line += f"  {_next(tokens, layer):<38}"
        yield line + (f"  {local.index[layer]:8.3f}" if local else "")
    if differ:
        yield "hidden: where the layer stands among all of the model's, dense ones included"
    if tokens:
        yield "next known: tokens whose next first choice is the likeliest, given this one"
        yield f"bits: mutual information of the two; by chance: tokens shuffled, seed {found.seed}"
    if local:
        whole = "" if local.num_samples == found.num_samples else f" of {found.num_samples:,}, drawn by hash"
        yield "locality: 0 where samples choose alike, 1 where each has its own experts;"
        yield f"from {local.num_samples:,} samples{whole}"


def _next(tokens: TokenStatistics, layer: int) -> str:
    """Columns on what a layer's first choice predicts of the next layer's. Empty for the last layer."""
    if layer >= len(tokens.affinity):
        return ""
    bits = tokens.information
    share = f"{tokens.affinity[layer]:10.0%} {tokens.chance[layer]:9.0%}"
    return f"{share}  {bits.bits[layer]:6.3f} {bits.shuffled[layer]:9.3f}"


def _information_json(found: Information) -> dict[str, list[float]]:
    return {"bits": found.bits.tolist(), "shuffled": found.shuffled.tolist(), "spread": found.spread.tolist()}


def _bar(share: float) -> str:
    filled = round(share * BAR)
    return "#" * filled + "." * (BAR - filled)
