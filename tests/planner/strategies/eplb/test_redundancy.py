"""How many redundant experts serve: every number weighed on fitted units that it was not placed by."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from moeplan.errors import UsageError
from moeplan.planner import task
from moeplan.planner.certify import certify
from moeplan.planner.evaluate.replay import step_loads
from moeplan.planner.strategies.eplb.options import Candidate, Redundancy
from moeplan.planner.strategies.eplb.strategy import STRATEGY
from moeplan.solvers import eplb
from moeplan.solvers.balance import step_balance
from moeplan.traces.split import fitted
from tests.planner.makers import assert_refused, edited, fit_part, judged, pictures_in, planned, stored, tallied

CANDIDATES = "options.placement.redundancy.candidates"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tallied(tmp_path_factory.mktemp("steps") / "t", hidden_size=64, ffn_size=96, dtype_bytes=2)[0]


def weighed(trace: Any, *asked: Any, **settings: Any) -> tuple[Any, Redundancy]:
    """A plan, and what was weighed for it."""
    plan = planned(trace, "eplb", *asked, **{"redundant": "auto"} | settings)
    return plan, Redundancy.model_validate(plan.options["placement"]["redundancy"])


@pytest.mark.parametrize("cluster", ["2x2", "1x3"])
def test_every_candidate_is_placed_by_three_parts_of_the_fitted_steps_and_weighed_on_the_fourth(
    trace: Any, tmp_path: Path, cluster: str
) -> None:
    plan, tried = weighed(trace, cluster, method="refined")
    devices = plan.cluster.num_devices
    fewest = -(-16 // devices)
    assert [one.redundant for one in tried.candidates] == [n * devices - 16 for n in range(fewest, fewest + 5)]
    fit_BLE = fit_part(tallied(tmp_path / "again")[1])
    place = np.random.default_rng(0).permutation(len(fit_BLE))
    unseen = fit_BLE[np.sort(place[::4])].astype(float)
    seen = np.concatenate([fit_BLE[np.sort(place[part::4])] for part in (1, 2, 3)])
    for one in tried.candidates:
        placement = eplb.solve(seen, plan.cluster, slots=one.slots).placement
        assert one.balance == pytest.approx(step_balance(unseen, placement), rel=1e-12)
        assert one.memory_bytes == one.slots * 3 * 3 * 64 * 96 * 2
    alone = planned(trace, "eplb", cluster, redundant=0, slots=tried.chosen.slots, method="refined")
    assert alone.decisions == plan.decisions
    least = min(one.balance for one in tried.candidates)
    assert tried.chosen == next(one for one in tried.candidates if one.balance <= 1.02 * least)
    certify(plan, trace.path)


def test_samples_that_judge_choose_neither_the_number_nor_the_placement(tmp_path: Path) -> None:
    trace, loads_BLE = tallied(tmp_path / "t")
    unseen = ~fitted(np.arange(len(loads_BLE)), seed=0, fraction=0.5)
    loads_BLE[unseen] = np.roll(loads_BLE[unseen], 5, axis=2)
    (plan, tried), (other, tried_too) = (weighed(one) for one in (trace, stored(tmp_path / "u", loads_BLE)))
    assert (tried, plan.options["placement"]["choice"]) == (tried_too, other.options["placement"]["choice"])
    assert plan.decisions == other.decisions
    assert judged(plan) != judged(other)


def test_with_a_profile_time_decides_of_counts_of_experts(trace: Any, make_trace: Any, make_profile: Any) -> None:
    profile = make_profile("2x2")
    for source, metric in ((trace, "experts_s"), (make_trace(samples=60), "step_s")):
        plan, tried = weighed(source, profile=profile)
        assert tried.metric == metric
        least = min(one.seconds or 0 for one in tried.candidates)
        assert tried.chosen == next(one for one in tried.candidates if (one.seconds or 0) <= 1.02 * least)
        certify(plan, source.path, profile)


def test_dead_devices_get_no_slots_and_no_more_are_tried_than_there_are_experts(trace: Any, tmp_path: Path) -> None:
    plan, tried = weighed(trace, dead=(3,))
    assert [one.redundant for one in tried.candidates] == [2, 5, 8, 11, 14]
    assert plan.placement.slots.tolist() == [tried.chosen.slots] * 3 + [0]
    _, tried = weighed(tallied(tmp_path / "t", experts=4)[0], "1x2")
    assert [one.slots for one in tried.candidates] == [2, 3, 4]


def test_the_fewest_within_two_percent_of_the_best_is_chosen() -> None:
    def one(redundant: int, balance: float, seconds: float) -> Candidate:
        known: dict[str, Any] = {"balance": balance, "balance_p95": balance, "seconds": seconds, "memory_bytes": None}
        return Candidate(redundant=redundant, slots=1 + redundant, **known)

    tried = (one(0, 1.5, 0.9), one(4, 1.019, 1.0), one(8, 1.0, 1.0))
    assert Redundancy(metric="balance", held_out=True, candidates=tried).chosen == tried[1]
    assert Redundancy(metric="step_s", held_out=True, candidates=tried).chosen == tried[0]


def test_what_was_weighed_chose_the_plan_and_adds_up(trace: Any) -> None:
    plan, tried = weighed(trace)
    certify(plan)
    chosen = f"{CANDIDATES}.{tried.candidates.index(tried.chosen)}"
    for key, change in (("redundant", lambda x: x + 1), ("memory_bytes", lambda x: x + 1)):
        assert_refused(edited(plan, f"{chosen}.{key}", change))
    assert_refused(edited(plan, f"{chosen}.balance", 9.0), words="redundancy that was weighed")


def test_pinned_experts_find_a_place_with_the_fewest_slots(trace: Any) -> None:
    _, crowded = weighed(trace, pins=tuple((expert, 0) for expert in range(6)))
    assert crowded.candidates[0].slots == 6  # all on one device, which 4 do not hold
    plan, alike = weighed(trace, pins=tuple((expert, device) for expert in range(4) for device in range(4)))
    assert alike.candidates[0].slots == 7  # four on all devices, and 12 once
    certify(plan, trace.path)
    with pytest.raises(UsageError, match="experts 0 to 15"):
        weighed(trace, pins=tuple((expert, 0) for expert in range(99)))


def test_the_steps_are_read_once_for_all_that_is_weighed(trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(side_effect=step_loads)
    monkeypatch.setattr(task, "step_loads", read)
    weighed(trace)
    assert read.call_count == 1


def test_the_page_draws_what_was_weighed_and_what_was_chosen(trace: Any) -> None:
    plan, tried = weighed(trace)
    (section,) = STRATEGY.pictures(plan, Path(), None)
    balance, *times = pictures_in(section)
    assert [[*line.y] for line in balance.lines] == [
        [row.balance for row in tried.candidates],
        [row.balance_p95 for row in tried.candidates],
    ]
    assert [*balance.lines[0].x] == [row.redundant for row in tried.candidates]
    assert [*balance.rules] == [(tried.chosen.redundant, "chosen")]
    assert len(times) == (tried.candidates[0].seconds is not None)
    assert [*STRATEGY.pictures(planned(trace, "eplb"), Path(), None)] == []


def test_nearest_weighs_only_what_holds_every_expert_on_every_node_and_no_token_leaves_its_node(
    make_trace: Any, tmp_path: Path
) -> None:
    trace = make_trace(samples=40)
    plan, tried = weighed(trace, "2x2", replica_rule="nearest")
    assert [one.slots for one in tried.candidates] == [4, 5, 6]
    figures = judged(plan)
    assert figures["plan/standard"]["node_copies"] == 0 < figures["contiguous/standard"]["node_copies"]
    assert figures["plan/standard"]["balance"] < figures["contiguous/standard"]["balance"]
    certify(plan, trace.path)
    fewest = planned(trace, "eplb", "2x2", replica_rule="nearest")
    assert fewest.placement.slots.tolist() == [4] * 4
    with pytest.raises(UsageError, match="nearest on 1x4, a single node"):
        planned(trace, "eplb", "1x4", redundant="auto", replica_rule="nearest")
    with pytest.raises(UsageError, match="--replica-rule nearest with --dead"):
        planned(trace, "eplb", "2x2", redundant="auto", replica_rule="nearest", dead=(1,))
