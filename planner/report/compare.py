"""Screen and page of `moeplan compare`.

Legend: D devices.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import printable
from ..compare import Compared, Comparison
from ..document import Section, Text, drawn, to_console, write_page
from ..evaluate.metrics import METRICS
from ..figures import contender_table, find, headlines, legend, megabytes, worded
from .answer import copies_remarks, gain_words, remark_sections, short_of, standing

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from rich.console import Console

RULES = {  # what engines do
    "even": "shared alike (vLLM)",
    "nearest": "the token's own device, else its node, else all alike",
    "static": "a fixed one for each device: its own, else on its node, else a fair choice (SGLang)",
    "round_robin": "in turn, each device from an offset of its own (TensorRT-LLM)",
}


def compare_report(comparison: Comparison, console: "Console", *, verbose: bool = False) -> None:
    """Print which plans pay here, all of them beside today, and what qualifies that."""
    part, first = comparison.part, comparison.compared[0]
    judged, today = first.verdict.metric, first.verdict.against
    names = [name for name in METRICS if METRICS[name].column]
    every = contender_table(part, names, today=today, ranged=True)
    sections = [
        Section("Answer", (Text((*_answers(comparison), _on(comparison))),)),
        Section("Beside today", (contender_table(part, headlines(part, judged), today=today, judged=judged),)),
        *remark_sections([*_remarks(comparison)]),
        Section("All figures (95 % intervals)", (every, Text(("", *legend(part, names)))), verbose=True),
    ]
    to_console(sections, console, verbose=verbose)


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """The comparison as a JSON object."""
    return {
        "trace": {"path": comparison.trace, "sha256": comparison.trace_sha256},
        "cluster": str(comparison.cluster),
        "unit": comparison.unit,
        "resampled": comparison.resampled,
        "samples_per_step": comparison.samples_per_step,
        "num_fitted_left_out": 0 if comparison.seen else comparison.num_fitted,
        "judged_on_fitted": comparison.seen,
        "part": comparison.part.model_dump(mode="json"),
        "seconds": None if comparison.seconds is None else comparison.seconds.model_dump(mode="json"),
        "replica_rule": comparison.replica_rule,
        "copies_between": {label: copies_DD.tolist() for label, copies_DD in comparison.between.items()},
        "copy_bytes": comparison.copy_bytes,
        "plans": [_plan(one) for one in comparison.compared],
        "no_longer_pay": comparison.failing,
    }


def write_matrices(comparison: Comparison, path: Path) -> None:
    """Write the matrices of a comparison as a page, all in one colour scale.

    Raises
    ------
    StorageError
        It cannot be written.
    """
    scale, unit = (1.0, "copies") if comparison.copy_bytes is None else (comparison.copy_bytes / 1e6, "MB")
    shown = {label: copies_DD * scale for label, copies_DD in comparison.between.items()}
    highest = max((float(one_DD.max()) for one_DD in shown.values()), default=0.0)
    sections = [
        drawn(worded(label), _between(one_DD, unit, comparison), _drawn(one_DD, unit, highest))
        for label, one_DD in shown.items()
    ]
    text = f"{unit} a step from device to device, dispatch and combine of all MoE layers; {comparison.cluster}, mean of"
    write_page(path, "What goes between devices", f"{text} {comparison.part.num_steps} step(s).", sections)


def _plan(one: Compared) -> dict[str, Any]:
    return {
        "path": one.path,
        "plan_sha256": one.plan.plan_sha256,
        "strategies": list(one.plan.strategies),
        "contender": one.label,
        "verdict": one.verdict.model_dump(mode="json"),
        "gain_when_solved": None if one.claimed is None else one.claimed.model_dump(mode="json"),
        "gain_when_solved_over_same": one.gain_over_same,
        "against_first": None if one.against_first is None else one.against_first.model_dump(mode="json"),
        "moves_from_first": None if one.moves is None else asdict(one.moves),
    }


def _on(comparison: Comparison) -> str:
    part, unit = comparison.part, comparison.unit
    seen = "fitted" if comparison.seen else "unseen"
    steps = f"{part.num_steps} complete step{'s' * (part.num_steps != 1)}"
    dropped = f" ({part.dropped_samples} trailing {unit}s dropped)" if part.dropped_samples else ""
    return (
        f"on {printable(comparison.trace)}: {part.num_samples:,} {seen} {unit}s, {part.num_tokens:,} tokens in"
        f" {steps}{dropped}; cluster {comparison.cluster}"
    )


def _answers(comparison: Comparison) -> Iterator[str]:
    for one in comparison.compared:
        stands = standing(one.verdict, paid_when_solved=one.paid_when_solved)
        gain = gain_words(one.verdict, comparison.part, of=one.label)
        yield f"{printable(one.path)} {stands}: {gain}{short_of(one.verdict) if one.verdict.value == 'none' else ''}"


def _remarks(comparison: Comparison) -> Iterator[str]:
    """Remarks that qualify the answers, the most important first."""
    part = comparison.part
    if comparison.seen:
        yield f"all {comparison.unit}s were fitted by these plans: expect less on others"
    elif comparison.num_fitted:
        yield f"{comparison.num_fitted} {comparison.unit}s that a plan was fitted to are left out"
    if comparison.replica_rule is not None:
        yield f"replicas: {RULES[comparison.replica_rule]}, in all plans and baselines"
    for one in comparison.compared:
        ours, base = find(part, one.label), find(part, one.verdict.against)
        yield from (f"{printable(one.path)}: {line}" for line in copies_remarks(one.verdict, ours, base))
        if (then := _claim(one)) is not None:
            yield f"{printable(one.path)}: {then}"
    for one in comparison.compared:
        if one.against_first is not None:
            gain = gain_words(one.against_first, part, of=one.label)
            yield f"{printable(one.path)}: {gain}{_moved(one)}"


def _moved(one: Compared) -> str:
    if one.moves is None:
        return ""
    size = "" if one.moves.num_bytes is None else f" ({megabytes(one.moves.num_bytes)} MB)"
    return f"; to get there {one.moves.experts:,} of {one.moves.held:,} experts move{size}"


def _claim(one: Compared) -> str | None:
    """The gain when it was solved; None where that was not judged alike."""
    evaluation, solved = one.plan.evaluation, one.plan.verdict
    if one.claimed is None or solved is None or evaluation is None:
        return None
    where = "" if evaluation.held_out else ", on the samples it was fitted to"
    return f"{gain_words(solved, evaluation.judging)} when it was solved{where}"


def _between(between_DD: NDArray[np.float64], unit: str, comparison: Comparison) -> str:
    """Totals of a matrix in words: in all, between nodes, and over the busiest pair."""
    node_D = np.arange(len(between_DD)) // comparison.cluster.devices_per_node
    far = float(between_DD[node_D[:, None] != node_D].sum())
    source, target = np.unravel_index(int(between_DD.argmax()), between_DD.shape)
    return (
        f"{between_DD.sum():.4g} {unit} a step, {far:.4g} of them between nodes; most from {source} to {target}:"
        f" {between_DD.max():.4g}."
    )


def _drawn(between_DD: NDArray[np.float64], unit: str, highest: float) -> "Figure":
    import plotly.graph_objects as go

    heat = go.Heatmap(z=between_DD, zmin=0.0, zmax=highest, colorscale="Blues", colorbar={"title": f"{unit} a step"})
    axes = {"xaxis": {"title": "to device"}, "yaxis": {"title": "from device", "autorange": "reversed"}}
    return go.Figure(heat).update_layout(**axes)
