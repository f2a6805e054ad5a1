"""Screen and page of `moeplan trace info`.

Legend: L MoE layers; E experts; G groups of neighbouring experts, which big models are drawn in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from ...traces.count_form import CountTrace
from ...traces.information import Information
from ...traces.reader import Trace
from ...traces.statistics import Statistics
from ..document import Section, Text, write_page
from ..figures import percent
from ..picture import BLUE, GREY, Axis, Heat, Line, Plot, group_size, grouped

BAR = 10
MAX_TICKS = 24  # of an axis of layers


def trace_report(trace: Trace | CountTrace, statistics: Statistics, console: Console) -> None:
    """Print what a trace holds and lacks, and a line per layer."""
    for line in (*_contents(trace, statistics), *_picture(statistics, trace.meta.model.layer_ids)):
        console.print(line)


def statistics_json(trace: Trace | CountTrace, statistics: Statistics) -> dict[str, Any]:
    """Statistics as a JSON object; null where the trace does not record them."""
    tokens, local = statistics.tokens, statistics.locality

    def information(part: Information) -> dict[str, list[float]]:
        return {name: getattr(part, name).tolist() for name in ("bits", "shuffled", "spread")}

    return {
        "path": str(trace.path),
        "sha256": trace.sha256,
        "form": trace.form,
        "model": trace.meta.model_dump(mode="json")["model"],
        "files": list(trace.files),
        "unfinished": list(trace.unfinished),
        "num_rows": trace.num_rows,
        "num_tokens": tokens and tokens.counts.num_tokens,
        **{name: getattr(statistics, name) for name in ("num_samples", "num_steps", "num_source_ranks")},
        "has_weights": trace.has_weights,
        "phase_tokens": tokens and dict(tokens.phase_tokens),
        "cells": tokens and tokens.cells,
        "not_routed": tokens and tokens.not_routed,
        "skew": statistics.skew.tolist(),
        "gini": statistics.gini.tolist(),
        "gini_by_chance": statistics.gini_by_chance.tolist(),
        "as_of_random_tokens": statistics.as_of_random_tokens,
        "affinity": tokens and tokens.affinity.tolist(),
        "chance": tokens and tokens.chance.tolist(),
        "affinity_information": tokens and information(tokens.information),
        "locality": local and local.index.tolist(),
        "locality_samples": local and local.num_samples,
        "locality_information": local and information(local.information),
        "seed": statistics.seed,
    }


def write_trace_page(trace: Trace | CountTrace, statistics: Statistics, path: Path) -> None:
    """Write the statistics of a trace as a page of figures; errors as in `write_page`."""
    model = trace.meta.model
    text = f"{model.num_layers} MoE layers x {model.num_experts} experts, top-{model.top_k}, from {trace.path}"
    warning = Section("", (Text.of(*_warning(statistics)),))
    sections = [warning, *_sections(statistics, _layer_names(model.layer_ids))]
    write_page(path, f"Routing of {model.name}", text, sections)


def _contents(trace: Trace | CountTrace, statistics: Statistics) -> Iterator[str]:
    model, tokens, parts = trace.meta.model, statistics.tokens, f"in {len(trace.files)} file(s)"
    limit = f" within {model.top_k_groups} of {model.num_expert_groups} groups" if model.top_k_groups else ""
    yield (
        f"model     {model.name}: {model.num_layers} MoE layers x {model.num_experts} experts, top-{model.top_k}"
        f"{limit}; recorded by {trace.meta.recorder}"
    )
    if tokens is None:
        yield f"counts    {trace.num_rows:,} rows, {statistics.loads.sum():,} token-expert pairs {parts}"
        yield "not there phases, transitions, co-activation and what was not routed"
    else:
        phases = ", ".join(f"{phase} {number:,}" for phase, number in tokens.phase_tokens.items())
        yield f"tokens    {tokens.counts.num_tokens:,} ({phases}) {parts}"
    numbers = statistics.num_samples, statistics.num_steps, statistics.num_source_ranks
    for name, number in zip(("samples", "steps", "ranks"), numbers, strict=True):
        yield f"{name:<9} {'not recorded' if number is None else f'{number:,}'}"
    if tokens is not None:
        yield f"weights   {'recorded' if trace.has_weights else 'not recorded'}"
        share = percent(tokens.not_routed / tokens.cells, 1)
        yield f"cells     {tokens.cells:,}, {tokens.not_routed:,} not routed ({share})"
    yield from (f"random?   {warning}" for warning in _warning(statistics))
    if trace.unfinished:
        yield f"skipped   {len(trace.unfinished)} unfinished part(s): {', '.join(trace.unfinished)}"


def _warning(statistics: Statistics) -> Iterator[str]:
    """A warning of recordings that look like those of random tokens."""
    if statistics.as_of_random_tokens and statistics.locality:
        figures = statistics.locality.index, statistics.gini, statistics.gini_by_chance
        alike, uneven, chance = map(np.median, figures)
        yield (
            f"samples choose alike (median locality {alike:.3f}; of text 0.04 and more), yet experts are loaded"
            f" unevenly (median Gini {uneven:.2f}; by chance {chance:.2f}). Recordings of random tokens look so, and"
            " overstate skew, up to 2.35 times; so do samples that each mix many documents. If the prompts were made"
            " up, record real ones."
        )


def _picture(statistics: Statistics, layer_ids: Sequence[int]) -> list[str]:
    """A line per layer, and a legend of its columns; hidden layers too, where they differ from the ordinals."""
    tokens, local, legend = statistics.tokens, statistics.locality, list[str]()
    columns = [["layer", *(f"{layer:>5}" for layer in range(len(layer_ids)))]]
    if [*layer_ids] != [*range(len(layer_ids))]:
        columns.append([" hidden", *(f"{hidden:>7}" for hidden in layer_ids)])
        legend.append("hidden: where the layer stands among all of the model's, dense ones included")
    filled_L = (statistics.skew / max(statistics.skew.max(), 1.0) * BAR).round().astype(int)
    bars = [f"{skew:5.2f} {'#' * filled:.<{BAR}}" for skew, filled in zip(statistics.skew, filled_L, strict=True)]
    columns.append([f"  {'load max/mean':<{BAR + 6}}", *(f"  {bar}" for bar in bars)])
    if tokens:
        pairs = zip(tokens.affinity, tokens.chance, tokens.information.bits, tokens.information.shuffled, strict=True)
        known = [
            f"  {percent(known):>10} {percent(chance):>9}  {bits:6.3f} {shuffled:9.3f}"
            for known, chance, bits, shuffled in pairs
        ]
        columns.append(["  next known  (chance)    bits  (chance)", *known, " " * 40])  # the last layer has no next
        legend.append("next known: tokens whose next first choice is the likeliest, given this one")
        legend.append(f"bits: mutual information of the two; chance: tokens shuffled, seed {statistics.seed}")
    if local:
        columns.append(["  locality", *(f"  {index:8.3f}" for index in local.index)])
        whole = "" if local.num_samples == statistics.num_samples else f" of {statistics.num_samples:,}, drawn by hash"
        legend.append("locality: 0 where samples choose alike, 1 where each has its own experts;")
        legend.append(f"from {local.num_samples:,} samples{whole}")
    return ["", *map("".join, zip(*columns, strict=True)), *legend]


def _sections(statistics: Statistics, names: Sequence[str]) -> Iterator[Section]:
    mean_L1 = statistics.loads.mean(1, keepdims=True)
    share_LE = statistics.loads / np.where(mean_L1 > 0, mean_L1, 1)
    text = "Token-expert pairs of each expert, over the mean of its layer: 1 everywhere is perfect balance."
    heat = Heat("", share_LE, float(share_LE.max()), Axis("expert"), _layer_axis(names), "x mean")
    yield Section("Loads", (Text.of(text), heat))
    if statistics.locality is not None:
        text = "0: the tokens of a sample choose as all tokens do; 1: every sample has experts of its own."
        lines = {"locality": statistics.locality.index}
        yield Section("Locality of samples", (Text.of(text), _lines(lines, "index", names)))
    tokens = statistics.tokens
    if tokens is None or not len(tokens.affinity):
        return
    bits = {"recorded": tokens.information.bits, "tokens shuffled": tokens.information.shuffled}
    text = (
        "Mutual information between the first choices of a layer and of the next. What lies above the shuffled tokens"
        " is what a placement can use."
    )
    yield Section("What a layer tells of the next", (Text.of(text), _lines(bits, "bits", names)))
    text = "Of the tokens whose first choice is the row's expert, the share that goes on to the column's."
    pairs = [f"{layer} to {following}" for layer, following in pairwise(names)]
    yield _maps("Transitions", text, tokens.counts.transitions, pairs)
    if tokens.counts.coactivation is not None and tokens.counts.coactivation.any():
        text = "Of the other choices of tokens that chose the row's expert, the share of the column's."
        yield _maps("Co-activation", text, tokens.counts.coactivation, names)


def _layer_names(layer_ids: Sequence[int]) -> list[str]:
    """Each layer's ordinal, with the hidden layer that it is in brackets where they differ."""
    return [f"{layer}" if layer == hidden else f"{layer} ({hidden})" for layer, hidden in enumerate(layer_ids)]


def _layer_axis(names: Sequence[str]) -> Axis:
    at = range(0, len(names), ceil(len(names) / MAX_TICKS))
    title = "layer (hidden layer)" if any("(" in name for name in names) else "layer"
    return Axis(title, ticks=[(layer, names[layer]) for layer in at])


def _lines(values: dict[str, NDArray[np.float64]], unit: str, names: Sequence[str]) -> Plot:
    lines = [
        Line(np.arange(len(line)), line, name, colour)
        for (name, line), colour in zip(values.items(), (BLUE, GREY), strict=False)
    ]
    axis = _layer_axis(names)
    return Plot("", lines, replace(axis, ticks=axis.ticks[:: ceil(len(axis.ticks) / 8)]), Axis(unit, zero=True))


def _maps(title: str, text: str, counts_LEE: NDArray[Any], names: Sequence[str]) -> Section:
    """Heat maps of each row's shares, side by side."""
    num_layers, num_experts, _ = counts_LEE.shape
    size = group_size(num_experts, num_layers)
    sums_LGG = grouped(counts_LEE, size)
    shares_LGG = sums_LGG / np.maximum(sums_LGG.sum(2, keepdims=True), 1)
    top = float(shares_LGG.max())
    groups = f" Rows and columns are groups of {size} experts." if size > 1 else ""
    maps = [Heat(name, table, top, small=True) for table, name in zip(shares_LGG, names, strict=True)]
    return Section(title, (Text.of(f"{text}{groups} Strongest colour: {percent(top)}."), *maps))
