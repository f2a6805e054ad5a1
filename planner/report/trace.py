"""Screen and page of `moeplan trace info`.

Legend: L MoE layers; E experts; G groups of neighbouring experts, which big models are drawn in.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...traces.count_form import CountTrace
from ...traces.information import Information
from ...traces.reader import Trace
from ...traces.statistics import Statistics, TokenStatistics
from ..document import Section, drawn, write_page

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from rich.console import Console

BAR = 10
MAX_CELLS = 400_000  # of the maps of all layers together: about 2 MB of the page
MAX_TICKS = 24  # of an axis of layers
COLOURS = "Viridis"


def trace_report(trace: Trace | CountTrace, statistics: Statistics, console: "Console") -> None:
    """Print what a trace holds and lacks, and a line per layer."""
    model = trace.meta.model
    limit = f" within {model.top_k_groups} of {model.num_expert_groups} groups" if model.top_k_groups else ""
    console.print(
        f"model     {model.name}: {model.num_layers} MoE layers x {model.num_experts} experts, top-{model.top_k}"
        f"{limit}; recorded by {trace.meta.recorder}"
    )
    for line in (*_contents(trace, statistics), *_picture(statistics, model.layer_ids)):
        console.print(line)


def statistics_json(trace: Trace | CountTrace, statistics: Statistics) -> dict[str, Any]:
    """The same as a JSON object; null is what the trace does not tell."""
    tokens, local = statistics.tokens, statistics.locality
    return {
        "path": str(trace.path),
        "sha256": trace.sha256,
        "form": trace.form,
        "model": trace.meta.model_dump(mode="json")["model"],
        "files": list(trace.files),
        "unfinished": list(trace.unfinished),
        "num_rows": trace.num_rows,
        "num_tokens": tokens and tokens.counts.num_tokens,
        "num_samples": statistics.num_samples,
        "num_steps": statistics.num_steps,
        "num_source_ranks": statistics.num_source_ranks,
        "has_weights": trace.has_weights,
        "phase_tokens": tokens and dict(tokens.phase_tokens),
        "cells": tokens and tokens.cells,
        "not_routed": tokens and tokens.not_routed,
        "skew": statistics.skew.tolist(),
        "affinity": tokens and tokens.affinity.tolist(),
        "chance": tokens and tokens.chance.tolist(),
        "affinity_information": tokens and _information_json(tokens.information),
        "locality": local and local.index.tolist(),
        "locality_samples": local and local.num_samples,
        "locality_information": local and _information_json(local.information),
        "seed": statistics.seed,
    }


def write_trace_page(trace: Trace | CountTrace, statistics: Statistics, path: Path) -> None:
    """Write what is known of a trace as a page of figures; errors as in `write_page`."""
    model = trace.meta.model
    text = f"{model.num_layers} MoE layers x {model.num_experts} experts, top-{model.top_k}, from {trace.path}"
    write_page(path, f"Routing of {model.name}", text, _sections(statistics, _layer_names(model.layer_ids)))


def _contents(trace: Trace | CountTrace, statistics: Statistics) -> Iterator[str]:
    tokens, parts = statistics.tokens, f"in {len(trace.files)} file(s)"
    if tokens is None:
        yield f"counts    {trace.num_rows:,} rows, {statistics.loads.sum():,} token-expert pairs {parts}"
        yield "not there phases, transitions, co-activation and what was not routed"
    else:
        phases = ", ".join(f"{phase} {number:,}" for phase, number in tokens.phase_tokens.items())
        yield f"tokens    {tokens.counts.num_tokens:,} ({phases}) {parts}"
    for name, number in (
        ("samples", statistics.num_samples),
        ("steps", statistics.num_steps),
        ("ranks", statistics.num_source_ranks),
    ):
        yield f"{name:<9} {'not recorded' if number is None else f'{number:,}'}"
    if tokens is not None:
        yield f"weights   {'recorded' if trace.has_weights else 'not recorded'}"
        yield f"cells     {tokens.cells:,}, {tokens.not_routed:,} not routed ({tokens.not_routed / tokens.cells:.1%})"
    if trace.unfinished:
        yield f"skipped   {len(trace.unfinished)} unfinished part(s): {', '.join(trace.unfinished)}"


def _picture(statistics: Statistics, layer_ids: Sequence[int]) -> Iterator[str]:
    """A line a layer: its number, the skew, what it tells of the next layer, the locality of samples.

    Its hidden layer too, where those are not the ordinals.
    """
    tokens, local = statistics.tokens, statistics.locality
    widest, differ = max(statistics.skew.max(), 1.0), [*layer_ids] != [*range(len(layer_ids))]
    yield ""
    yield (
        f"layer{' hidden' if differ else ''}  {'load max/mean':<{BAR + 6}}"
        + ("  next known  (chance)    bits  (chance)" if tokens else "")
        + ("  locality" if local else "")
    )
    for layer, skew in enumerate(statistics.skew.tolist()):
        hidden = f"{layer_ids[layer]:>7}" if differ else ""
        filled = round(skew / widest * BAR)
        line = f"{layer:>5}{hidden}  {skew:5.2f} {'#' * filled:.<{BAR}}"
        if tokens:
            line += f"  {_next(tokens, layer):<38}"
        yield line + (f"  {local.index[layer]:8.3f}" if local else "")
    if differ:
        yield "hidden: where the layer stands among all of the model's, dense ones included"
    if tokens:
        yield "next known: tokens whose next first choice is the likeliest, given this one"
        yield f"bits: mutual information of the two; chance: tokens shuffled, seed {statistics.seed}"
    if local:
        whole = "" if local.num_samples == statistics.num_samples else f" of {statistics.num_samples:,}, drawn by hash"
        yield "locality: 0 where samples choose alike, 1 where each has its own experts;"
        yield f"from {local.num_samples:,} samples{whole}"


def _next(tokens: TokenStatistics, layer: int) -> str:
    """Columns on what a layer's first choice predicts of the next layer's. Empty for the last layer."""
    if layer >= len(tokens.affinity):
        return ""
    bits = tokens.information
    share = f"{tokens.affinity[layer]:10.0%} {tokens.chance[layer]:9.0%}"
    return f"{share}  {bits.bits[layer]:6.3f} {bits.shuffled[layer]:9.3f}"


def _information_json(information: Information) -> dict[str, list[float]]:
    return {name: getattr(information, name).tolist() for name in ("bits", "shuffled", "spread")}


def _sections(statistics: Statistics, names: Sequence[str]) -> Iterator[Section]:
    yield _loads(statistics, names)
    if statistics.locality is not None:
        text = "0: the tokens of a sample choose as all tokens do; 1: every sample has experts of its own."
        yield drawn("Locality of samples", text, _lines({"locality": statistics.locality.index}, "index", names))
    if statistics.tokens is None or not len(statistics.tokens.affinity):
        return
    tokens, counts = statistics.tokens, statistics.tokens.counts
    bits = {"recorded": tokens.information.bits, "tokens shuffled": tokens.information.shuffled}
    text = (
        "Mutual information between the first choices of a layer and of the next. What lies above the shuffled tokens"
        " is what a placement can use."
    )
    yield drawn("What a layer tells of the next", text, _lines(bits, "bits", names))
    text = "Of the tokens whose first choice is the row's expert, the share that goes on to the column's."
    pairs = [f"{layer} to {following}" for layer, following in pairwise(names)]
    yield _maps("Transitions", text, counts.transitions, pairs, "expert in the next layer")
    if counts.coactivation is not None and counts.coactivation.any():
        text = "Of the other choices of tokens that chose the row's expert, the share of the column's."
        yield _maps("Co-activation", text, counts.coactivation, names, "other expert")


def _loads(statistics: Statistics, names: Sequence[str]) -> Section:
    import plotly.graph_objects as go

    share_LE = statistics.loads / np.maximum(statistics.loads.mean(1, keepdims=True), 1)
    figure = go.Figure(go.Heatmap(z=share_LE.astype(np.float32), colorscale=COLOURS, colorbar={"title": "x mean"}))
    figure.update_layout(xaxis_title="expert", yaxis=_layer_axis(names), height=max(350, 16 * len(share_LE)))
    text = "Token-expert pairs of each expert, over the mean of its layer: 1 everywhere is perfect balance."
    return drawn("Loads", text, figure)


def _layer_names(layer_ids: Sequence[int]) -> list[str]:
    """Each layer's ordinal, with the hidden layer that it is in brackets where they differ."""
    return [f"{layer}" if layer == hidden else f"{layer} ({hidden})" for layer, hidden in enumerate(layer_ids)]


def _layer_axis(names: Sequence[str]) -> dict[str, Any]:
    at = range(0, len(names), ceil(len(names) / MAX_TICKS))
    hidden = any("(" in name for name in names)
    title = "layer (hidden layer)" if hidden else "layer"
    return {"title": title, "tickvals": [*at], "ticktext": [names[layer] for layer in at]}


def _lines(values: dict[str, NDArray[np.float64]], unit: str, names: Sequence[str]) -> "Figure":
    import plotly.graph_objects as go

    figure = go.Figure([go.Scatter(y=line, name=name, mode="lines+markers") for name, line in values.items()])
    return figure.update_layout(xaxis=_layer_axis(names), yaxis_title=unit, yaxis_rangemode="tozero", height=350)


def _maps(title: str, text: str, counts_LEE: NDArray[Any], names: Sequence[str], across: str) -> Section:
    """Heat maps of each row's shares, of which a slider shows one."""
    import plotly.graph_objects as go

    num_layers, num_experts, _ = counts_LEE.shape
    size = ceil(num_experts / max(1, isqrt(MAX_CELLS // num_layers)))  # experts that share a row
    first_G = np.arange(0, num_experts, size)
    sums_LGG = np.add.reduceat(np.add.reduceat(counts_LEE.astype(np.float64), first_G, axis=1), first_G, axis=2)
    shares_LGG = (sums_LGG / np.maximum(sums_LGG.sum(2, keepdims=True), 1)).astype(np.float32)
    figure = go.Figure(
        [
            go.Heatmap(x=first_G, y=first_G, z=table, colorscale=COLOURS, name=name, visible=layer == 0)
            for layer, (table, name) in enumerate(zip(shares_LGG, names, strict=True))
        ]
    )
    steps = [
        {"label": name, "method": "update", "args": [{"visible": [other == layer for other in range(len(names))]}]}
        for layer, name in enumerate(names)
    ]
    slider = {"steps": steps, "currentvalue": {"prefix": "layer "}, "pad": {"t": 50}}
    figure.update_layout(
        xaxis_title=across, yaxis_title="expert", yaxis_autorange="reversed", sliders=[slider], height=750
    )
    grouped = f" Rows and columns are groups of {size} experts, named by their first." if size > 1 else ""
    return drawn(title, f"{text}{grouped}", figure)
