from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError, UsageError
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import load, save


def request(trace: Any, **changes: Any) -> Request:
    settings: dict[str, Any] = {"strategy": "exflow", "trace": str(trace.path), "cluster": Cluster.parse("1x2")}
    return Request.of(**settings | changes)


@pytest.mark.parametrize("strategy", ["exflow", "eplb", "contiguous"])
@pytest.mark.parametrize("cluster", ["1x3", "2x2", "8x1"])
def test_every_strategy_plans_for_any_cluster_and_its_plan_survives_the_disk(
    make_trace: Any, tmp_path: Path, strategy: str, cluster: str
) -> None:
    plan = solve(request(make_trace(), strategy=strategy, cluster=Cluster.parse(cluster)))
    save(plan, tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == plan


def test_the_same_seed_gives_the_same_plan_and_another_seed_another_split(make_trace: Any) -> None:
    trace = make_trace(samples=40)
    one, again, other = (solve(request(trace, seed=seed)) for seed in (1, 1, 2))
    assert one.plan_sha256 == again.plan_sha256
    assert one.evaluation == again.evaluation
    assert one.evaluation is not None
    assert other.evaluation is not None
    assert one.evaluation.fit.num_tokens != other.evaluation.fit.num_tokens or one.evaluation != other.evaluation


def test_a_split_that_leaves_one_side_empty_is_refused(make_trace: Any) -> None:
    with pytest.raises(InputError, match="--fit-fraction 1"):
        solve(request(make_trace(samples=1)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fit_fraction": 0.0}, "--fit-fraction"),
        ({"time_limit_s": 0.0}, "--time-limit"),
        ({"redundant": 3}, "--redundant 4"),
        ({"slots": 3}, "at least 4 a device"),
        ({"slots": 9}, "an expert once"),
        ({"strategy": "eplb", "dispatch_model": "coherent"}, "--dispatch"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_met_says_what_could(make_trace: Any, changes: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        solve(request(make_trace(), **changes))
