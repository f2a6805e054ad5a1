from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import MismatchError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.compare import compare
from moeplan.planner.options import PlacementOptions, Replanned
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Plan, load
from moeplan.solvers.exflow.replan import reconsider
from moeplan.solvers.moves import experts_moved
from moeplan.traces.model import Attention
from tests.planner.makers import said, stored_tokens


def planned(trace: Any, path: Path, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"strategy": "exflow", "trace": str(trace.path), "cluster": Cluster.parse("2x2")}
    made = make(Request.of(**settings | changes))
    made.save(path)
    return made.plan


def options_of(plan: Plan) -> Replanned:
    found = PlacementOptions.model_validate(dict(plan.options["placement"])).replanned
    assert found is not None
    return found


@pytest.fixture(scope="module")
def old(make_trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan in force, from other text."""
    path = tmp_path_factory.mktemp("old") / "old.json"
    planned(make_trace(samples=40, seed=1), path)
    return path


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    return make_trace(samples=80)


def test_a_plan_is_re_planned_under_the_names_that_move_least_and_certifies_without_the_old_one(
    trace: Any, old: Path, tmp_path: Path
) -> None:
    plain = planned(trace, tmp_path / "plain.json")
    plan = planned(trace, tmp_path / "next.json", previous=old)
    found, before = options_of(plan), load(old).placement
    assert before is not None
    assert plan.placement is not None
    assert plain.placement is not None
    assert found.experts_moved == experts_moved(plan.placement, before).sum()
    assert found.experts_moved <= experts_moved(plain.placement, before).sum()
    assert (found.experts_held, found.plan_sha256) == (24, load(old).plan_sha256)
    assert found.bytes_moved == found.experts_moved * 3 * 96 * 64 * 2
    assert plan.outcome["placement"].objective.value <= 1.01 * plain.outcome["placement"].objective.value
    assert plan.evaluation is not None
    assert "previous" not in {one.name for one in plan.evaluation.fit.contenders}
    assert "moves from the plan in force and the gain over it" in certify(plan, trace.path).unchecked


def test_the_gain_over_the_plan_in_force_is_the_difference_of_both_on_the_held_out_samples(
    trace: Any, old: Path, tmp_path: Path
) -> None:
    plan = planned(trace, tmp_path / "next.json", previous=old)
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    both = compare([tmp_path / "next.json", old], trace.path).compared[1].against_first
    gain = options_of(plan).verdict.gain
    assert both is not None
    assert both.gain.value == pytest.approx(-gain.value)
    assert both.gain.high == pytest.approx(-gain.low)  # type: ignore[operator]


def test_moves_are_paid_back_when_the_copies_saved_weigh_as_much_as_the_experts_moved(
    make_trace: Any, trace: Any, tmp_path: Path
) -> None:
    planned(make_trace(samples=40, seed=1), tmp_path / "old.json", objective="copies")
    plan = planned(trace, tmp_path / "next.json", previous=tmp_path / "old.json", objective="copies")
    found = options_of(plan)
    assert found.verdict.metric == "device_copies"
    assert found.experts_moved > 0
    assert found.verdict.gain.value > 0
    vectors = found.experts_moved * 3 * 96
    assert found.paid_back_tokens == pytest.approx(vectors / (found.verdict.gain.value * 3))  # 3 layers
    same = planned(trace, tmp_path / "same.json", previous=tmp_path / "next.json", objective="copies")
    assert options_of(same).paid_back_tokens is None


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({}, 1),
        ({"objective": "copies"}, 1),
        ({"dispatch_model": "standard"}, 2),
        ({"dispatch_model": "standard", "objective": "hops"}, 1),
    ],
    ids=str,
)
def test_a_move_is_weighed_at_the_vectors_of_an_expert_over_those_saved_within_a_tenth_of_the_time(
    trace: Any, old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], saved: int
) -> None:
    if "dispatch_model" in changes:
        old = tmp_path / "old.json"
        planned(trace, old, seed=1, **changes)
    asked = list[dict[str, Any]]()

    def noted(*args: Any, **options: Any) -> Any:
        asked.append(options)
        return reconsider(*args, **options)

    monkeypatch.setattr("moeplan.planner.strategies.exflow.strategy.reconsider", noted)
    plan = planned(trace, tmp_path / "next.json", previous=old, horizon_tokens=5e4, time_limit_s=20.0, **changes)
    assert plan.evaluation is not None
    (options,) = asked
    assert options["price"] == pytest.approx(3 * 96 * plan.evaluation.fit.num_tokens / 5e4 / saved)
    assert options["time_limit_s"] == pytest.approx(2.0)


def test_within_a_short_horizon_nothing_moves_and_the_plan_in_force_is_kept(
    trace: Any, old: Path, tmp_path: Path
) -> None:
    plan = planned(trace, tmp_path / "next.json", previous=old, horizon_tokens=1.0)
    found, before = options_of(plan), load(old).placement
    assert before is not None
    assert plan.placement is not None
    assert (plan.placement.physical_to_logical == before.physical_to_logical).all()
    assert (found.experts_moved, found.verdict.value, found.verdict.gain.value) == (0, "none", 0)
    certify(plan, trace.path)
    assert "keep the plan in force: no move is worth its price" in said(plan)


def test_on_the_same_trace_nothing_moves_and_that_is_said(trace: Any, tmp_path: Path) -> None:
    planned(trace, tmp_path / "old.json")
    plan = planned(trace, tmp_path / "next.json", previous=tmp_path / "old.json")
    assert options_of(plan).experts_moved == 0
    assert "keep the plan in force: no move is worth its price" in said(plan)


@pytest.mark.parametrize(
    "changes", [{"dispatch_model": "standard"}, {"max_load": 1.3}, {"objective": "copies"}], ids=str
)
def test_moves_are_weighed_whatever_is_kept_together_and_told_by_what_each_saves(
    make_trace: Any, trace: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    planned(make_trace(samples=40, seed=1), tmp_path / "old.json", **changes)
    free, dear = (
        planned(trace, tmp_path / "next.json", previous=tmp_path / "old.json", horizon_tokens=horizon, **changes)
        for horizon in (1e9, 1.0)
    )
    assert options_of(free).experts_moved > options_of(dear).experts_moved
    certify(free, trace.path)
    gain = options_of(free).verdict
    assert gain.metric == ("node_copies" if free.dispatch_model == "standard" else "device_copies")
    pays = gain.value == "benefit"
    assert f"{'worth replacing' if pays else 'keep'} the plan in force" in said(free)


def test_dispatch_and_slots_are_those_of_the_plan_in_force(trace: Any, make_trace: Any, tmp_path: Path) -> None:
    planned(make_trace(seed=1), tmp_path / "old.json", redundant=4, dispatch_model="standard")
    plan = planned(trace, tmp_path / "next.json", previous=tmp_path / "old.json")
    assert plan.dispatch_model == "standard"
    assert plan.placement is not None
    assert plan.placement.slots.tolist() == [3, 3, 3, 3]


def test_what_cannot_be_re_planned_is_refused(trace: Any, make_trace: Any, old: Path, tmp_path: Path) -> None:
    for changes, words in (
        ({"cluster": Cluster.parse("1x2")}, "a plan for 2x2, asked for 1x2"),
        ({"horizon_tokens": 9.0, "redundant": 4}, "12 then"),
    ):
        with pytest.raises(UsageError, match=words):
            planned(trace, tmp_path / "no.json", **{"previous": old} | changes)
    with pytest.raises(UsageError, match="beside --from"):
        planned(trace, tmp_path / "no.json", horizon_tokens=9.0)
    with pytest.raises(MismatchError, match="expected the same model"):
        planned(make_trace(experts=16), tmp_path / "no.json", previous=old)
    planned(trace, tmp_path / "policy.json", strategy="netmoe")
    with pytest.raises(UsageError, match="expected a placement alone"):
        planned(trace, tmp_path / "no.json", previous=tmp_path / "policy.json")


def sized(trace: Any, path: Path, **sizes: Any) -> Any:
    """The trace with other sizes of the model."""
    return stored_tokens(path, replace(trace.model, **sizes), *trace.batches())


def test_sizes_that_only_one_of_plan_and_trace_knows_are_no_other_model(trace: Any, old: Path, tmp_path: Path) -> None:
    unsized = sized(trace, tmp_path / "unsized", hidden_size=None, attention=Attention())
    assert planned(unsized, tmp_path / "next.json", previous=old).model.hidden_size is None
    planned(trace, tmp_path / "back.json", previous=tmp_path / "next.json")
    other = sized(trace, tmp_path / "other", hidden_size=65)
    with pytest.raises(MismatchError, match=r"a plan for hidden_size 64, .* has hidden_size 65; expected the same"):
        planned(other, tmp_path / "no.json", previous=old)
    planned(trace, tmp_path / "base.json", dispatch_model="standard")
    with pytest.raises(MismatchError, match=r"a plan for hidden_size 64.* has hidden_size unknown"):
        planned(unsized, tmp_path / "no.json", strategy="pipemoe", on=tmp_path / "base.json")


def test_a_horizon_needs_the_size_of_an_expert_and_says_so_before_the_search(
    trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsized = sized(trace, tmp_path / "unsized", ffn_size=None)
    planned(unsized, tmp_path / "old.json")
    assert options_of(planned(unsized, tmp_path / "next.json", previous=tmp_path / "old.json")).bytes_moved is None
    monkeypatch.setattr("moeplan.solvers.exflow.solve", lambda *_, **__: pytest.fail("searched"))
    with pytest.raises(UsageError, match="--ffn-size"):
        planned(unsized, tmp_path / "no.json", previous=tmp_path / "old.json", horizon_tokens=1e6)
