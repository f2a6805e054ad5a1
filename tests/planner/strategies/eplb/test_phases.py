"""Plans made on one phase and judged on either."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.planner.compare import compare
from moeplan.planner.request import Phase, Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import save
from moeplan.solvers import eplb
from moeplan.traces.reader import Trace
from moeplan.traces.schema import PHASES
from moeplan.traces.split import fitted
from tests.planner.makers import stored_tokens

PAIR: tuple[Phase, Phase] = ("prefill", "decode")


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


def test_a_plan_made_on_one_phase_is_compared_on_the_other(make_trace: Any, tmp_path: Path) -> None:
    trace = shifted(make_trace(samples=60, columns=("sample",)), tmp_path / "t")
    balances = dict[tuple[str, str], float]()
    settings: dict[str, Any] = {"strategy": "eplb", "trace": str(trace.path), "cluster": Cluster.parse("1x4")}
    for phase in PAIR:
        plan = solve(Request.of(**settings, phases=(phase,), samples_per_step=1000))
        expected = eplb.solve(loads_of(trace, phase, fit=True), plan.cluster).placement
        assert plan.placement is not None
        assert np.array_equal(plan.placement.physical_to_logical, expected.physical_to_logical)
        save(plan, tmp_path / f"{phase}.json")
    for phase in PAIR:
        found = compare([tmp_path / f"{made_on}.json" for made_on in PAIR], trace.path, phases=(phase,))
        unseen = loads_of(trace, phase, fit=False)
        for made_on, one in zip(PAIR, found.compared, strict=True):
            metrics = next(row.metrics for row in found.part.contenders if row.label == one.label)
            balances[made_on, phase] = metrics["balance"].value
            assert metrics["balance"].value == pytest.approx(even(unseen, one.plan.placement), rel=1e-12)
    assert any(balances[made_on, phase] > balances[phase, phase] for made_on, phase in balances)
