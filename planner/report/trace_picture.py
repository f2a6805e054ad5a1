"""A trace as a page: loads, what a layer tells of the next, the locality of samples, transitions and co-activation.

Legend: L MoE layers; E experts; G groups of neighbouring experts, which big models are drawn in.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, isqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...traces.count_form import CountTrace
from ...traces.reader import Trace
from ...traces.statistics import Statistics, TokenStatistics
from ..document import Section, drawn, write_page

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["write_trace_page"]

MAX_CELLS = 400_000  # of the maps of all layers together: about 2 MB of the page
MAX_TICKS = 24  # of an axis of layers
COLOURS = "Viridis"


def write_trace_page(trace: Trace | CountTrace, found: Statistics, path: str | os.PathLike[str]) -> None:
    """Write what is known of a trace as a page of figures; errors as in `write_page`."""
    model = trace.meta.model
    text = f"{model.num_layers} MoE layers x {model.num_experts} experts, top-{model.top_k}, from {trace.path}"
    write_page(path, f"Routing of {model.name}", text, _sections(found, _layer_names(model.layer_ids)))


def _sections(found: Statistics, names: Sequence[str]) -> Iterator[Section]:
    yield _loads(found, names)
    if found.locality is not None:
        text = "0: the tokens of a sample choose as all tokens do; 1: every sample has experts of its own."
        yield drawn("Locality of samples", text, _lines({"locality": found.locality.index}, "index", names))
    if found.tokens is None or not len(found.tokens.affinity):
        return
    yield _information(found.tokens, names)
    yield _transitions(found.tokens, names)
    if found.tokens.counts.coactivation is not None and found.tokens.counts.coactivation.any():
        yield _coactivation(found.tokens, names)


def _loads(found: Statistics, names: Sequence[str]) -> Section:
    """Every expert's load over its layer's mean."""
    import plotly.graph_objects as go

    share_LE = found.loads / np.maximum(found.loads.mean(1, keepdims=True), 1)
    figure = go.Figure(go.Heatmap(z=share_LE.astype(np.float32), colorscale=COLOURS, colorbar={"title": "x mean"}))
    figure.update_layout(xaxis_title="expert", yaxis=_layer_axis(names), height=max(350, 16 * len(share_LE)))
    text = "Token-expert pairs of each expert, over the mean of its layer: 1 everywhere is perfect balance."
    return drawn("Loads", text, figure)


def _information(tokens: TokenStatistics, names: Sequence[str]) -> Section:
    bits = {"recorded": tokens.information.bits, "tokens shuffled": tokens.information.shuffled}
    text = (
        "Mutual information between the first choices of a layer and of the next. What lies above the shuffled tokens"
        " is what a placement can use."
    )
    return drawn("What a layer tells of the next", text, _lines(bits, "bits", names))


def _transitions(tokens: TokenStatistics, names: Sequence[str]) -> Section:
    W_LEE = tokens.counts.transitions
    size = _group_size(W_LEE.shape)
    maps = _shares(_grouped(W_LEE, size))
    pairs = [f"{layer} to {following}" for layer, following in pairwise(names)]
    figure = _maps(maps, pairs, "expert in the next layer", "expert", size)
    text = f"Of the tokens whose first choice is the row's expert, the share that goes on to the column's.{_said(size)}"
    return drawn("Transitions", text, figure)


def _coactivation(tokens: TokenStatistics, names: Sequence[str]) -> Section:
    C_LEE = tokens.counts.coactivation
    assert C_LEE is not None
    size = _group_size(C_LEE.shape)
    maps = _shares(_grouped(C_LEE, size))
    figure = _maps(maps, names, "other expert", "expert", size)
    text = f"Of the other choices of tokens that chose the row's expert, the share of the column's.{_said(size)}"
    return drawn("Co-activation", text, figure)


def _layer_names(layer_ids: Sequence[int]) -> list[str]:
    """Each layer's ordinal, with the hidden layer that it is in brackets where they differ."""
    return [f"{layer}" if layer == hidden else f"{layer} ({hidden})" for layer, hidden in enumerate(layer_ids)]


def _layer_axis(names: Sequence[str]) -> dict[str, Any]:
    """An axis with ticks at whole layers."""
    at = range(0, len(names), ceil(len(names) / MAX_TICKS))
    hidden = any("(" in name for name in names)
    title = "layer (hidden layer)" if hidden else "layer"
    return {"title": title, "tickvals": [*at], "ticktext": [names[layer] for layer in at]}


def _lines(values: dict[str, NDArray[np.float64]], unit: str, names: Sequence[str]) -> "Figure":
    """A line a name over layers."""
    import plotly.graph_objects as go

    figure = go.Figure([go.Scatter(y=line, name=name, mode="lines+markers") for name, line in values.items()])
    return figure.update_layout(xaxis=_layer_axis(names), yaxis_title=unit, yaxis_rangemode="tozero", height=350)


def _maps(maps_LGG: NDArray[np.float32], names: Sequence[str], across: str, down: str, size: int) -> "Figure":
    """Heat maps of which a slider shows one."""
    import plotly.graph_objects as go

    first_G = np.arange(maps_LGG.shape[1]) * size
    figure = go.Figure(
        [
            go.Heatmap(x=first_G, y=first_G, z=table, colorscale=COLOURS, name=name, visible=layer == 0)
            for layer, (table, name) in enumerate(zip(maps_LGG, names, strict=True))
        ]
    )
    steps = [
        {"label": name, "method": "update", "args": [{"visible": [other == layer for other in range(len(names))]}]}
        for layer, name in enumerate(names)
    ]
    slider = {"steps": steps, "currentvalue": {"prefix": "layer "}, "pad": {"t": 50}}
    return figure.update_layout(
        xaxis_title=across, yaxis_title=down, yaxis_autorange="reversed", sliders=[slider], height=750
    )


def _group_size(shape: tuple[int, ...]) -> int:
    """Experts that share a row, so that the maps of all layers stay within `MAX_CELLS`."""
    num_layers, num_experts, _ = shape
    return ceil(num_experts / max(1, isqrt(MAX_CELLS // num_layers)))


def _grouped(table_LEE: NDArray[np.int64] | NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """The table of groups of `size` experts, `[L, G, G]`."""
    firsts = np.arange(0, table_LEE.shape[1], size)
    return np.add.reduceat(np.add.reduceat(table_LEE.astype(np.float64), firsts, axis=1), firsts, axis=2)


def _shares(table_LGG: NDArray[np.float64]) -> NDArray[np.float32]:
    """Each row over its sum."""
    return np.asarray(table_LGG / np.maximum(table_LGG.sum(2, keepdims=True), 1), np.float32)


def _said(size: int) -> str:
    return f" Rows and columns are groups of {size} experts, named by their first." if size > 1 else ""
