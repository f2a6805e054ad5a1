"""A plan made on prefill and judged on decode, and the other way round."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.planner.certify import certify
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Plan
from moeplan.solvers import eplb
from moeplan.traces.reader import Trace
from moeplan.traces.schema import PHASES
from moeplan.traces.split import fitted
from tests.planner.makers import said, stored_tokens


def planned(trace: Any, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"strategy": "eplb", "cluster": Cluster.parse("1x4"), "samples_per_step": 1000}
    return solve(Request.of(trace=str(trace.path), **settings | changes))


def shifted(trace: Any, folder: Path) -> Trace:
    """The trace with prefill and then decode in every sample, and other experts in decode."""
    num_experts, batches = trace.model.num_experts, []
    for batch in trace.batches():
        late = batch.position >= 4
        other = late[:, None, None] & (batch.ids < num_experts)
        ids = np.where(other, (3 * batch.ids + 1) % num_experts, batch.ids).astype(np.uint16)
        phase = np.where(late, PHASES.index("decode"), PHASES.index("prefill")).astype(np.int8)
        batches.append(replace(batch, phase=phase, ids=ids))
    return stored_tokens(folder, trace.model, *batches)


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
    trace = shifted(make_trace(samples=60, columns=("sample",)), tmp_path / "t")
    plan = planned(trace)
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
    assert "plans of a phase judged on another" in certify(plan, trace.path).unchecked
    assert f"made on prefill, judged on decode: balance {swaps[0]['balance']:.3f}" in said(plan)


def test_with_one_phase_or_nothing_held_out_there_is_nothing_to_exchange(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(samples=40)
    both = shifted(trace, tmp_path / "t")
    for changes in ({"phases": ("decode",)}, {"fit_fraction": 1.0}, {"strategy": "contiguous"}):
        assert planned(both, **changes).options["placement"]["swaps"] == []
    assert planned(trace).options["placement"]["swaps"] == []
