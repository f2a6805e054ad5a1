"""A plan made on prefill and judged on decode, and the other way round."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moeplan.planner.certify import certify
from moeplan.planner.reports.plan import solve_report
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Plan
from moeplan.solvers import eplb
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import PHASES, TraceMeta
from moeplan.traces.split import fitted
from moeplan.traces.writer import TraceWriter


def planned(path: Any, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"strategy": "eplb", "cluster": Cluster.parse("1x4"), "samples_per_step": 1000}
    return solve(Request(trace=str(path), **settings | changes))


def shifted(trace: Any, folder: Path) -> Path:
    """The trace with prefill and then decode in every sample, and other experts in decode."""
    num_experts = trace.model.num_experts
    with TraceWriter(folder, TraceMeta(form="tokens", model=trace.model, recorder="test")) as writer:
        for batch in trace.batches():
            late = batch.position >= 4
            ids = np.where(
                late[:, None, None] & (batch.ids < num_experts), (3 * batch.ids + 1) % num_experts, batch.ids
            )
            phase = np.where(late, PHASES.index("decode"), PHASES.index("prefill")).astype(np.int8)
            writer.append(replace(batch, phase=phase, ids=ids.astype(np.uint16)))
    return folder


def loads_of(trace: Any, phase: str, *, fit: bool) -> Any:
    """Loads of a phase of the fitted or held-out samples, `[L, E]`, token by token."""
    loads = np.zeros((trace.model.num_layers, trace.model.num_experts), np.int64)
    for batch in trace.batches():
        mine = fitted(batch.sample, seed=0, fraction=0.5) == fit
        for ids_LK in batch.ids[mine & (batch.phase == PHASES.index(phase))]:
            for layer, ids_K in enumerate(ids_LK.tolist()):
                for expert in ids_K:
                    if expert < loads.shape[1]:
                        loads[layer, expert] += 1
    return loads


def even(loads: Any, placement: Any) -> float:
    ratios = []
    for layer in range(placement.num_layers):
        held = placement.holds(layer)
        device = (loads[layer] / held.sum(axis=1)) @ held
        ratios.append(device.max() / device.mean())
    return float(np.mean(ratios))


def test_either_phase_is_planned_for_and_judged_on_the_other(make_trace: Any, tmp_path: Path) -> None:
    folder = shifted(make_trace(samples=60, columns=("sample",)), tmp_path / "t")
    trace, plan = open_trace(folder), planned(folder)
    swaps = plan.options["placement"]["swaps"]
    assert [(one["made_on"], one["judged_on"]) for one in swaps] == [("prefill", "decode"), ("decode", "prefill")]
    made = {
        phase: eplb.solve(loads_of(trace, phase, fit=True), plan.cluster).placement for phase in ("prefill", "decode")
    }
    for one in swaps:
        unseen = loads_of(trace, one["judged_on"], fit=False)
        assert one["balance"] == pytest.approx(even(unseen, made[one["made_on"]]), rel=1e-12)
        assert one["own"] == pytest.approx(even(unseen, made[one["judged_on"]]), rel=1e-12)
    assert any(one["balance"] > one["own"] for one in swaps)
    assert "plans of a phase judged on another" in certify(plan, folder).unchecked
    screen = Console(file=io.StringIO(), width=200)
    solve_report(plan, Path("plan.json"), screen)
    assert f"made on prefill, judged on decode: balance {swaps[0]['balance']:.3f}" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_with_one_phase_or_nothing_held_out_there_is_nothing_to_exchange(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(samples=40)
    both = shifted(trace, tmp_path / "t")
    for changes in ({"phases": ("decode",)}, {"fit_fraction": 1.0}, {"strategy": "contiguous"}):
        assert planned(both, **changes).options["placement"]["swaps"] == []
    assert planned(trace.path).options["placement"]["swaps"] == []
