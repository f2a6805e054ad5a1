"""What eplb is asked to keep: dead devices, pinned experts, whole groups."""

from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import CertificationError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from tests.planner.makers import balances, edited, held_out, tallied


def request(**changes: Any) -> Request:
    settings: dict[str, Any] = {"strategy": "eplb", "trace": "t", "cluster": Cluster.parse("2x2")}
    return Request.of(**settings | changes)


def test_dead_devices_hold_nothing_pins_are_held_and_both_are_certified(tmp_path: Path) -> None:
    trace, counts = tallied(tmp_path / "t")
    plan = solve(request(trace=str(trace.path), dead=(1,), pins=((3, 0), (5, 3), (3, 2)), redundant=5))
    assert plan.placement is not None
    assert plan.placement.slots.tolist() == [7, 0, 7, 7]
    for layer in range(3):
        assert {3} <= {*plan.placement.held(layer, 0)} & {*plan.placement.held(layer, 2)}
        assert 5 in plan.placement.held(layer, 3)
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    ours = plan.evaluation.held_out.contenders[0].metrics["balance"].value
    assert ours == pytest.approx(balances(plan, held_out(counts)).mean(), rel=1e-12)
    assert "dead devices, pins and whole groups" in certify(plan, trace.path).checks
    for path, change in (
        ("dead", [1, 2]),
        ("pins", [[3, 3], [4, 3], [6, 3], [7, 3], [8, 3], [9, 3], [10, 3], [11, 3]]),
    ):
        with pytest.raises(CertificationError):
            certify(edited(plan, f"options.placement.{path}", change))


def test_whole_groups_are_blocks_in_every_layer_and_are_certified(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t", num_expert_groups=4)
    plan = solve(request(trace=str(trace.path), groups="whole"))
    assert plan.placement is not None
    for row in plan.placement.physical_to_logical // 4:
        assert [len({*row[first : first + 4].tolist()}) for first in range(0, 16, 4)] == [1] * 4
    certify(plan, trace.path)
    swapped = plan.model_dump(mode="json")["decisions"]["placement"]["physical_to_logical"]
    first, second = swapped[0][:4], swapped[0][4:8]
    swapped[0][:8] = [*sorted([*first[:3], second[0]]), *sorted([first[3], *second[1:]])]
    with pytest.raises(CertificationError, match="is split"):
        certify(edited(plan, "decisions.placement.physical_to_logical", swapped))
    in_order = [[*range(5), *range(4, 9), *range(8, 13), *range(12, 16)]] * 3  # one after another, but with replicas
    uneven = {"physical_to_logical": in_order, "slots_per_device": [5, 5, 5, 4]}
    with pytest.raises(CertificationError, match="is split"):
        certify(edited(plan, "decisions.placement", lambda made: made | uneven))


@pytest.mark.parametrize("strategy", ["eplb", "exflow"])
def test_groups_of_a_model_without_any_cannot_be_whole(tmp_path: Path, make_trace: Any, strategy: str) -> None:
    with pytest.raises(UsageError, match="expert groups"):
        solve(request(trace=str(make_trace(samples=20).path), strategy=strategy, groups="whole"))
