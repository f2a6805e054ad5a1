"""What eplb is asked to keep: dead devices, pinned experts, numbers that a request refuses."""

from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import CertificationError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.cli.solve_flags import Balance, Slots
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from tests.planner.edits import edited
from tests.planner.measures.tallies import balances, held_out, tallied


def request(**changes: Any) -> Request:
    settings: dict[str, Any] = {"strategy": "eplb", "trace": "t", "cluster": Cluster.parse("2x2")}
    return Request(**settings | changes)


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy": "exflow", "dead": (1,)}, "--dead with --strategy exflow; only eplb"),
        ({"strategy": "contiguous", "pins": ((0, 1),)}, "--pin with --strategy contiguous"),
        ({"strategy": "exflow", "redundant": "auto"}, "--redundant auto with --strategy exflow"),
        ({"strategy": "exflow", "quantile": 0.9}, "--quantile with --strategy exflow"),
        ({"strategy": "contiguous", "groups": "whole"}, "only exflow and eplb keep groups whole"),
        ({"dead": (4,)}, "device 4; expected 0 to 3"),
        ({"pins": ((0, 9),)}, "device 9; expected 0 to 3"),
        ({"dead": (0, 1, 2, 3)}, "expected a device that is alive"),
        ({"dead": (1,), "pins": ((7, 1),)}, "--pin 7@1; device 1 is --dead"),
        ({"quantile": 0.0}, "--quantile 0.0; expected above 0"),
        ({"quantile": float("nan")}, "--quantile nan; expected above 0"),
        ({"redundant": -1}, "--redundant -1"),
        ({"groups": "whole", "redundant": "auto"}, "--groups whole with --redundant or --dead"),
        ({"groups": "whole", "dead": (1,)}, "--groups whole with --redundant or --dead"),
        ({"mixture": (("t", 1.0),), "quantile": 0.5}, "--quantile with several --trace"),
        ({"redundant": "auto", "slots": 5}, "--slots and --redundant both"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_met_is_refused_before_anything_is_read(changes: Any, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        request(**changes)
    assert words in str(refused.value)


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
        certify(edited(plan, "decisions.placement.physical_to_logical", swapped, hashed=True))
    in_order = [[*range(5), *range(4, 9), *range(8, 13), *range(12, 16)]] * 3  # one after another, but with replicas
    uneven = {"physical_to_logical": in_order, "slots_per_device": [5, 5, 5, 4]}
    with pytest.raises(CertificationError, match="is split"):
        certify(edited(plan, "decisions.placement", lambda made: made | uneven, hashed=True))


@pytest.mark.parametrize("strategy", ["eplb", "exflow"])
def test_groups_of_a_model_without_any_cannot_be_whole(tmp_path: Path, make_trace: Any, strategy: str) -> None:
    with pytest.raises(UsageError, match="expert groups"):
        solve(request(trace=str(make_trace(samples=20).path), strategy=strategy, groups="whole"))


@pytest.mark.parametrize("text", ["3", "@", "3@", "@3", "a@1", "-1@2", "1@2@3", "1@²", "1" * 5000 + "@0"])
def test_a_pin_is_an_expert_at_a_device(text: str) -> None:
    with pytest.raises(UsageError, match="expected EXPERT@DEVICE"):
        Balance(pin=[text]).chosen()


def test_flags_become_what_a_request_takes() -> None:
    found = Balance(pin=["3@1", "12@0", "3@1"], dead=[2, 1, 2]).chosen()
    assert (found["pins"], found["dead"]) == (((3, 1), (12, 0)), (1, 2))
    assert Slots(redundant="auto").chosen()["redundant"] == "auto"
    assert Slots(redundant="-3").chosen()["redundant"] == -3
    with pytest.raises(UsageError, match="a number of slots, or auto"):
        Slots(redundant="many").chosen()
    with pytest.raises(UsageError, match="a number of slots, or auto"):
        Slots(redundant="9" * 5000).chosen()
