"""What `moeplan trace info` prints of a trace."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..traces.reader import Trace
from ..traces.statistics import Statistics

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["statistics_json", "trace_report"]

BAR = 24


def trace_report(trace: Trace, found: Statistics, console: "Console") -> None:
    """How much of what, and a bar a layer for skew and affinity."""
    model = trace.model
    console.print(
        f"model     {model.name}: {model.num_layers} MoE layers x {model.num_experts} experts, top-{model.top_k};"
        f" recorded by {trace.meta.recorder}"
    )
    phases = ", ".join(f"{phase} {tokens:,}" for phase, tokens in found.phase_tokens.items())
    console.print(f"tokens    {found.num_tokens:,} ({phases}) in {len(trace.files)} file(s)")
    for name, number in (
        ("samples", found.num_samples),
        ("steps", found.num_steps),
        ("ranks", found.num_source_ranks),
    ):
        console.print(f"{name:<9} {'not recorded' if number is None else f'{number:,}'}")
    console.print(f"cells     {found.cells:,}, {found.not_routed:,} not routed ({found.not_routed / found.cells:.1%})")
    if trace.unfinished:
        console.print(f"skipped   {len(trace.unfinished)} unfinished part(s): {', '.join(trace.unfinished)}")
    for line in _picture(found):
        console.print(line)


def statistics_json(trace: Trace, found: Statistics) -> dict[str, Any]:
    """The same as a JSON object."""
    return {
        "path": str(trace.path),
        "sha256": trace.sha256,
        "model": trace.meta.model_dump(mode="json")["model"],
        "files": list(trace.files),
        "unfinished": list(trace.unfinished),
        "num_tokens": found.num_tokens,
        "num_samples": found.num_samples,
        "num_steps": found.num_steps,
        "num_source_ranks": found.num_source_ranks,
        "phase_tokens": dict(found.phase_tokens),
        "cells": found.cells,
        "not_routed": found.not_routed,
        "skew": found.skew.tolist(),
        "affinity": found.affinity.tolist(),
        "chance": found.chance.tolist(),
    }


def _picture(found: Statistics) -> Sequence[str]:
    """Skew and affinity as bars, layer by layer."""
    widest = max(found.skew.max(), 1.0)
    lines = ["", "layer  load max/mean                    next expert known: share (chance)"]
    for layer, skew in enumerate(found.skew.tolist()):
        line = f"{layer:>5}  {skew:5.2f} {_bar(skew / widest)}"
        if layer < len(found.affinity):
            share, chance = found.affinity[layer], found.chance[layer]
            line += f"  {share:4.0%} ({chance:3.0%}) {_bar(share)}"
        lines.append(line)
    return lines


def _bar(share: float) -> str:
    filled = round(share * BAR)
    return "#" * filled + "." * (BAR - filled)
