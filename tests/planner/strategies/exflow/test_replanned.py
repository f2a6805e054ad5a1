"""A plan beside the one in force: what moves, what a move costs and saves, and what cannot be re-planned."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from moeplan.errors import MismatchError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.compare import compare
from moeplan.planner.strategies.exflow.options import Replanned
from moeplan.planner.strategies.placement_options import PlacementOptions
from moeplan.runtime.plan import load
from moeplan.solvers.exflow.replan import reconsider
from moeplan.solvers.moves import experts_moved
from moeplan.traces.model import Attention
from tests.builders import known
from tests.planner.makers import planned, said, sized

KEEP = "keep the plan in force: no move is worth its price"


def moves_of(plan: Any) -> Replanned:
    return known(PlacementOptions.model_validate(dict(plan.options["placement"])).replanned)


@pytest.fixture(scope="module")
def older(make_trace: Any) -> Any:
    """Other text."""
    return make_trace(samples=40, seed=1)


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    return make_trace(samples=80)


@pytest.fixture(scope="module")
def old(older: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan in force, from other text."""
    path = tmp_path_factory.mktemp("old") / "old.json"
    planned(older, to=path)
    return path


def test_a_plan_is_re_planned_under_the_names_that_move_least(trace: Any, old: Path, tmp_path: Path) -> None:
    plain, before = planned(trace), known(load(old).placement)
    plan = planned(trace, previous=old, to=tmp_path / "next.json")
    moves = moves_of(plan)
    assert moves.experts_moved == experts_moved(plan.placement, before).sum()
    assert moves.experts_moved <= experts_moved(plain.placement, before).sum()
    assert (moves.experts_held, moves.plan_sha256) == (24, load(old).plan_sha256)
    assert moves.bytes_moved == moves.experts_moved * 3 * 96 * 64 * 2
    assert plan.outcome["placement"].objective.value <= 1.01 * plain.outcome["placement"].objective.value
    assert "previous" not in {one.name for one in plan.evaluation.fit.contenders}
    assert "moves from the plan in force and the gain over it" in certify(plan, trace.path).unchecked
    both = known(compare([tmp_path / "next.json", old], trace.path).compared[1].against_first).gain
    assert (both.value, both.high) == pytest.approx((-moves.verdict.gain.value, -known(moves.verdict.gain.low)))


def test_moves_are_paid_back_when_copies_saved_weigh_as_much_as_experts(older: Any, trace: Any, tmp_path: Path) -> None:
    before, after = tmp_path / "old.json", tmp_path / "next.json"
    planned(older, objective="copies", to=before)
    moves = moves_of(planned(trace, objective="copies", previous=before, to=after))
    assert moves.verdict.metric == "device_copies"
    assert moves.experts_moved > 0
    assert moves.verdict.gain.value > 0
    vectors = moves.experts_moved * 3 * 96
    assert moves.paid_back_tokens == pytest.approx(vectors / (moves.verdict.gain.value * 3))  # 3 layers
    assert moves_of(planned(trace, objective="copies", previous=after)).paid_back_tokens is None


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
def test_a_move_is_weighed_at_the_vectors_of_an_expert_over_those_saved(
    trace: Any, old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], saved: int
) -> None:
    if "dispatch_model" in changes:
        old = tmp_path / "old.json"
        planned(trace, seed=1, to=old, **changes)
    asked = Mock(side_effect=reconsider)
    monkeypatch.setattr("moeplan.planner.strategies.exflow.strategy.reconsider", asked)
    plan = planned(trace, previous=old, horizon=5e4, time_limit_s=20.0, **changes)
    options = asked.call_args.kwargs
    assert options["price"] == pytest.approx(3 * 96 * plan.evaluation.fit.num_tokens / 5e4 / saved)
    assert options["time_limit_s"] == pytest.approx(2.0)


def test_within_a_short_horizon_or_on_the_same_trace_nothing_moves(trace: Any, old: Path, tmp_path: Path) -> None:
    plan, before = planned(trace, previous=old, horizon=1.0), known(load(old).placement)
    assert (plan.placement.physical_to_logical == before.physical_to_logical).all()
    assert (moves_of(plan).verdict.value, moves_of(plan).verdict.gain.value) == ("none", 0)
    certify(plan, trace.path)
    planned(trace, to=tmp_path / "old.json")
    for one in (plan, planned(trace, previous=tmp_path / "old.json")):
        assert moves_of(one).experts_moved == 0
        assert KEEP in said(one)


def test_what_moves_nothing_does_not_pay_whatever_its_verdict(trace: Any, old: Path) -> None:
    moves = moves_of(planned(trace, previous=old, horizon=1e9))
    gained = {"verdict": moves.verdict.model_copy(update={"value": "benefit"})}
    assert not moves.model_copy(update=gained | {"experts_moved": 0}).pays
    assert moves.model_copy(update=gained | {"experts_moved": 1}).pays


def test_dispatch_and_slots_are_those_of_the_plan_in_force(trace: Any, older: Any, tmp_path: Path) -> None:
    planned(older, redundant=4, dispatch_model="standard", to=tmp_path / "old.json")
    plan = planned(trace, previous=tmp_path / "old.json")
    assert (plan.dispatch_model, moves_of(plan).verdict.metric) == ("standard", "node_copies")
    assert plan.placement.slots.tolist() == [3, 3, 3, 3]


def test_what_cannot_be_re_planned_is_refused(trace: Any, make_trace: Any, old: Path, tmp_path: Path) -> None:
    planned(trace, "netmoe", to=tmp_path / "policy.json")
    planned(trace, dispatch_model="standard", to=tmp_path / "base.json")
    planned(trace, "netmoe", on=tmp_path / "base.json", to=tmp_path / "both.json")
    for changes, words in (
        ({"cluster": "1x2"}, "a plan for 2x2, asked for 1x2"),
        ({"horizon": 9.0, "redundant": 4}, "12 then"),
        ({"horizon": 9.0, "previous": None}, "beside --from"),
        (
            {"previous": tmp_path / "policy.json"},
            "it decides sample_policy; expected a placement alone: leave --from out, which plans anew",
        ),
        (
            {"previous": tmp_path / "both.json"},
            f"it decides placement and sample_policy; .*: give the plan that it was added to, {tmp_path}/base.json,"
            " then add the rest again with --on",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            planned(trace, **{"previous": old} | changes)
    with pytest.raises(MismatchError, match="expected the same model"):
        planned(make_trace(experts=16), previous=old)


def test_sizes_that_only_one_of_plan_and_trace_knows_are_no_other_model(trace: Any, old: Path, tmp_path: Path) -> None:
    unsized = sized(trace, tmp_path / "u", hidden_size=None, attention=Attention())
    assert planned(unsized, previous=old, to=tmp_path / "next.json").model.hidden_size is None
    planned(trace, previous=tmp_path / "next.json")
    other = sized(trace, tmp_path / "other", hidden_size=65)
    with pytest.raises(MismatchError, match=r"a plan for hidden_size 64, .* has hidden_size 65; expected the same"):
        planned(other, previous=old)
    planned(trace, dispatch_model="standard", to=tmp_path / "base.json")
    with pytest.raises(MismatchError, match=r"a plan for hidden_size 64.* has hidden_size unknown"):
        planned(unsized, "pipemoe", on=tmp_path / "base.json")


def test_a_horizon_needs_the_size_of_an_expert_and_says_so_before_the_search(
    trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsized, old = sized(trace, tmp_path / "u", ffn_size=None), tmp_path / "old.json"
    planned(unsized, to=old)
    assert moves_of(planned(unsized, previous=old)).bytes_moved is None
    monkeypatch.setattr("moeplan.solvers.exflow.solve", lambda *_, **__: pytest.fail("searched"))
    with pytest.raises(UsageError, match="--ffn-size"):
        planned(unsized, previous=old, horizon=1e6)
