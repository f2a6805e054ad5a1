"""Traces in which no expert of a token is known to be its first: what needs that one is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import UsageError
from moeplan.planner.compare import compare
from moeplan.planner.request import Request
from moeplan.planner.solve import make, solve
from moeplan.profilers.cluster import Cluster
from moeplan.traces.reader import Trace
from tests.conftest import MakeTrace
from tests.planner.makers import rewritten

TWO = Cluster(1, 2)


@pytest.fixture
def ordered(make_trace: MakeTrace) -> Trace:
    return make_trace(samples=12)


@pytest.fixture
def unordered(ordered: Trace, tmp_path: Path) -> Trace:
    return rewritten(ordered, tmp_path / "unordered", choice_order="unknown")


def request(trace: Trace, **wanted: Any) -> Request:
    settings: dict[str, Any] = {"strategy": "exflow", "trace": str(trace.path), "cluster": TWO}
    return Request.of(**settings | wanted)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({}, "coherent dispatch needs to know the first"),
        ({"strategy": "contiguous", "dispatch_model": "coherent"}, "coherent dispatch needs"),
        ({"dispatch_model": "standard", "objective": "hops"}, "--objective hops needs"),
        ({"dispatch_model": "standard", "method": "sweeps"}, "--objective hops needs"),
    ],
)
def test_what_follows_first_choices_is_refused(unordered: Trace, wanted: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        solve(request(unordered, **wanted))


def test_what_needs_no_first_choice_is_planned_as_from_an_ordered_trace(ordered: Trace, unordered: Trace) -> None:
    plans = [solve(request(trace, strategy="eplb")) for trace in (ordered, unordered)]
    assert plans[0].decisions == plans[1].decisions
    assert solve(request(unordered, dispatch_model="standard")).placement is not None


def test_tokens_of_one_expert_have_a_first(make_trace: MakeTrace, tmp_path: Path) -> None:
    trace = rewritten(make_trace(samples=12, top_k=1), tmp_path / "one", choice_order="unknown")
    assert solve(request(trace)).placement is not None


def test_a_coherent_plan_is_not_judged_on_such_a_trace(ordered: Trace, unordered: Trace, tmp_path: Path) -> None:
    made = make(replace(request(ordered), fit_fraction=1.0))
    made.save(tmp_path / "plan.json")
    with pytest.raises(UsageError, match=r"plan\.json, a coherent plan, needs to know the first"):
        compare([tmp_path / "plan.json"], str(unordered.path))
