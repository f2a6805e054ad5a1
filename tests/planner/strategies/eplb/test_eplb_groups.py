from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.planner.certify import certify
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.solvers.placement import keeps_groups_whole
from tests.planner.makers import rewritten


@pytest.mark.parametrize("strategy", ["eplb", "exflow"])
def test_with_expert_groups_eplb_keeps_each_on_a_node_as_plan_and_as_baseline_and_it_certifies(
    make_trace: Any, tmp_path: Path, strategy: str
) -> None:
    plain = make_trace(samples=40)
    rewritten(plain, tmp_path / "grouped", model=replace(plain.model, num_expert_groups=4))
    plans = [
        solve(Request.of(strategy=strategy, trace=str(path), cluster=Cluster.parse("2x2"), redundant=4))
        for path in (tmp_path / "grouped", plain.path)
    ]
    found, other = (plan.evaluation.fit.contenders[-1].metrics for plan in plans if plan.evaluation)
    assert found != other
    certify(plans[0], tmp_path / "grouped")
    if strategy == "eplb":
        assert plans[0].placement is not None
        assert plans[0].outcome["placement"].backend == "moeplan hierarchical"
        for row in plans[0].placement.physical_to_logical.reshape(-1, 2, 6):
            groups = [set((node // 2).tolist()) for node in row]
            assert not groups[0] & groups[1]
            assert np.unique(row).size == 8


@pytest.mark.parametrize("changes", [{}, {"dispatch_model": "standard"}, {"method": "sweeps"}], ids=str)
def test_whole_groups_of_exflow_are_blocks_and_its_cap_on_loads_stays_away(
    make_trace: Any, tmp_path: Path, changes: Any
) -> None:
    plain = make_trace(samples=40)
    rewritten(plain, tmp_path / "grouped", model=replace(plain.model, num_expert_groups=4))
    request = Request.of(
        strategy="exflow", trace=str(tmp_path / "grouped"), cluster=Cluster.parse("2x2"), groups="whole", **changes
    )
    plan = solve(request)
    assert plan.placement is not None
    assert keeps_groups_whole(plan.placement, 4)
    assert plan.options["placement"]["groups"] == "whole"
    assert "dead devices, pins and whole groups" in certify(plan, tmp_path / "grouped").checks
