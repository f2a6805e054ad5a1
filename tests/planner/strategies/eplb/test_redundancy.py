"""How many redundant experts serve: every number weighed on the part that judges."""

from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import CertificationError, UsageError
from moeplan.planner import task
from moeplan.planner.certify import certify
from moeplan.planner.evaluate.replay import step_loads
from moeplan.planner.options import Candidate, Redundancy
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.planner.strategies.eplb.sections import write_redundancy
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Plan
from tests.planner.edits import edited
from tests.planner.makers import tallied


def planned(trace: Any, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"strategy": "eplb", "cluster": Cluster.parse("2x2"), "redundant": "auto"}
    return solve(Request.of(trace=str(trace.path), **settings | changes))


def weighed(plan: Plan) -> Redundancy:
    return Redundancy.model_validate(plan.options["placement"]["redundancy"])


def figures(plan: Plan) -> dict[str, float]:
    assert plan.evaluation is not None
    part = plan.evaluation.judging
    return {name: one.value for name, one in part.contenders[0].metrics.items()}


@pytest.mark.parametrize("cluster", ["2x2", "1x3"])
def test_every_candidate_is_what_a_plan_with_as_many_gives_and_the_plan_is_that_of_the_choice(
    tmp_path: Path, cluster: str
) -> None:
    trace, _ = tallied(tmp_path / "t", hidden_size=64, ffn_size=96, dtype_bytes=2)
    plan = planned(trace, cluster=Cluster.parse(cluster))
    found, devices = weighed(plan), plan.cluster.num_devices
    assert [one.redundant for one in found.candidates] == [
        slots * devices - 16 for slots in range(-(-16 // devices), -(-16 // devices) + 5)
    ]
    for one in found.candidates:
        alone = planned(trace, cluster=Cluster.parse(cluster), redundant=0, slots=one.slots)
        assert figures(alone)["balance"] == pytest.approx(one.balance, rel=1e-12)
        assert figures(alone)["balance_p95"] == pytest.approx(one.balance_p95, rel=1e-12)
        assert one.memory_bytes == one.slots * 3 * 3 * 64 * 96 * 2
        if one == found.chosen:
            assert alone.decisions == plan.decisions
    least = min(one.balance for one in found.candidates)
    assert found.chosen == next(one for one in found.candidates if one.balance <= 1.02 * least)
    certify(plan, trace.path)


@pytest.mark.parametrize("counts", [False, True])
def test_with_a_profile_time_decides_of_counts_that_of_the_experts(
    tmp_path: Path, make_trace: Any, make_profile: Any, counts: bool
) -> None:
    trace = make_trace(samples=60)
    if counts:
        trace, _ = tallied(tmp_path / "t", hidden_size=64, ffn_size=96, dtype_bytes=2)
    profile = make_profile("2x2")
    plan = planned(trace, profile=profile)
    found = weighed(plan)
    assert found.metric == ("experts_s" if counts else "step_s")
    assert found.chosen.seconds == pytest.approx(figures(plan)[found.metric], rel=1e-12)
    certify(plan, trace.path, profile)


def test_dead_devices_get_no_slots_and_the_others_divide_what_is_added(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t")
    plan = planned(trace, dead=(3,))
    assert [one.redundant for one in weighed(plan).candidates] == [2, 5, 8, 11, 14]
    assert plan.placement is not None
    assert plan.placement.slots.tolist() == [weighed(plan).chosen.slots] * 3 + [0]
    certify(plan, trace.path)


def test_no_more_slots_are_tried_than_there_are_experts(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t", experts=4)
    assert [one.slots for one in weighed(planned(trace, cluster=Cluster.parse("1x2"))).candidates] == [2, 3, 4]


def test_the_fewest_within_two_percent_of_the_best_is_chosen() -> None:
    def one(redundant: int, balance: float, seconds: float | None = None) -> Candidate:
        return Candidate(
            redundant=redundant,
            slots=1 + redundant,
            balance=balance,
            balance_p95=balance,
            seconds=seconds,
            memory_bytes=None,
        )

    tried = (one(0, 1.5, 0.9), one(4, 1.019, 1.0), one(8, 1.0, 1.0))
    assert Redundancy(metric="balance", held_out=True, candidates=tried).chosen == tried[1]
    assert Redundancy(metric="step_s", held_out=True, candidates=tried).chosen == tried[0]


def test_a_plan_of_another_number_than_was_weighed_best_is_refused(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t")
    plan = planned(trace)
    chosen = weighed(plan).candidates.index(weighed(plan).chosen)
    with pytest.raises(CertificationError, match="redundancy that was weighed"):
        certify(edited(plan, f"options.placement.redundancy.candidates.{chosen}.balance", 9.0))


@pytest.mark.parametrize(
    ("of_chosen", "change"),
    [
        ("balance", lambda x: x - 1e-6),
        ("balance_p95", lambda x: x + 1e-6),
        ("seconds", 1.0),
        ("memory_bytes", lambda x: x + 1),
        ("redundant", lambda x: x + 1),
    ],
)
def test_the_choice_has_the_figures_of_the_plan(tmp_path: Path, of_chosen: str, change: Any) -> None:
    trace, _ = tallied(tmp_path / "t", hidden_size=64, ffn_size=96, dtype_bytes=2)
    plan = planned(trace)
    chosen = weighed(plan).candidates.index(weighed(plan).chosen)
    certify(plan)
    with pytest.raises(CertificationError):
        certify(edited(plan, f"options.placement.redundancy.candidates.{chosen}.{of_chosen}", change))
    with pytest.raises(CertificationError, match="redundancy on held-out units"):
        certify(edited(plan, "options.placement.redundancy.held_out", False))


def test_pinned_experts_find_a_place_with_the_fewest_slots(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t")
    crowded = planned(trace, pins=tuple((expert, 0) for expert in range(6)))
    assert weighed(crowded).candidates[0].slots == 6  # all on one device, which 4 do not hold
    alike = planned(trace, pins=tuple((expert, device) for expert in range(4) for device in range(4)))
    assert weighed(alike).candidates[0].slots == 7  # four on all devices, and 12 once
    certify(alike, trace.path)
    with pytest.raises(UsageError, match="experts 0 to 15"):
        planned(trace, pins=tuple((expert, 0) for expert in range(99)))


def test_the_steps_are_read_once_for_all_that_is_weighed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _ = tallied(tmp_path / "t")
    read: list[Any] = []

    def counted(*given: Any, **named: Any) -> Any:
        read.append(given)
        return step_loads(*given, **named)

    monkeypatch.setattr(task, "step_loads", counted)
    planned(trace)
    assert len(read) == 1


def test_the_weighing_becomes_a_page_of_its_own(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t")
    plan = planned(trace)
    write_redundancy(plan, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "redundant experts per layer" in page
    assert "within 2 % of the best" in page
    assert f"{weighed(plan).chosen.redundant} replicas per layer: the fewest" in page
    with pytest.raises(UsageError, match=r"name it \.html"):
        write_redundancy(plan, tmp_path / "page.json")
    with pytest.raises(UsageError, match="--redundant auto"):
        write_redundancy(planned(trace, redundant=0), tmp_path / "page.html")
