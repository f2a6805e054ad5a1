"""Traces of counts as engines record them, and the balance of a plan on them by hand."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeplan.runtime.plan import Plan
from moeplan.traces.count_form import CountTable, CountTrace, read_counts, write_counts
from moeplan.traces.model import ModelSpec
from moeplan.traces.schema import TraceMeta
from moeplan.traces.split import fitted

Loads = NDArray[np.int64]


def tallied(
    folder: Path,
    *,
    steps: int = 40,
    layers: int = 3,
    experts: int = 16,
    keys: tuple[str, ...] = ("step",),
    seed: int = 0,
    **model: Any,
) -> tuple[CountTrace, Loads]:
    """A trace of counts with skewed loads that vary from step to step, and its loads `[U, L, E]`."""
    rng = np.random.default_rng(seed)
    usual = np.random.default_rng(7).lognormal(0, 1, (layers, experts))
    shares = usual * rng.lognormal(0, 0.3, (steps, layers, experts))
    counts = np.array([[rng.multinomial(512, one / one.sum()) for one in step] for step in shares])
    return stored(folder, counts, keys, **model), counts


def stored(folder: Path, counts: Loads, keys: tuple[str, ...] = ("step",), **model: Any) -> CountTrace:
    """A trace of these counts `[U, L, E]`, every one a step, or a sample."""
    num_units, layers, experts = counts.shape
    unit = np.repeat(np.arange(num_units), layers)
    table = CountTable(
        step=unit.astype(np.int32) if "step" in keys else None,
        sample=unit * 3 if "sample" in keys else None,
        layer=np.tile(np.arange(layers, dtype=np.int32), num_units),
        counts=counts.reshape(-1, experts),
    )
    spec = ModelSpec(name="tallied", layer_ids=tuple(range(layers)), num_experts=experts, top_k=2, **model)
    write_counts(folder, TraceMeta(form="counts", model=spec, recorder="test"), [table])
    return read_counts(folder)


def held_out(loads: Loads, *, seed: int = 0, fraction: float = 0.5, ids: Loads | None = None) -> Loads:
    """The loads of the units that are held out."""
    return loads[~fitted(np.arange(len(loads)) if ids is None else ids, seed=seed, fraction=fraction)]


def balances(plan: Plan, loads: Loads) -> NDArray[np.float64]:
    """Max over mean device load in every step and layer `[B, L]`, replicas sharing alike, from the plan's own lists."""
    assert plan.decisions.placement is not None
    slots, rows = plan.decisions.placement.slots_per_device, plan.decisions.placement.physical_to_logical
    widths = [slots] * plan.cluster.num_devices if isinstance(slots, int) else list(slots)
    found = np.zeros(loads.shape[:2])
    for step, layer in np.ndindex(*found.shape):
        row, at, devices = list(rows[layer]), 0, []
        for width in widths:
            devices.append(sum(loads[step, layer, e] / row.count(e) for e in row[at : at + width]))
            at += width
        used = [load for load, width in zip(devices, widths, strict=True) if width]
        found[step, layer] = max(used) * len(used) / sum(used)
    return found
