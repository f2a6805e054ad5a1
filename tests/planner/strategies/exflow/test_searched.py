"""What exflow alone is asked for: pairs where tokens return home, caps, stages, thorough bounds, and their proof."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moeplan.errors import CertificationError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Plan
from tests.planner.makers import edited, said


def made(trace: Any, cluster: str = "1x4", **changes: Any) -> Plan:
    settings: dict[str, Any] = {"fit_fraction": 1.0} | changes
    return solve(Request.of(strategy="exflow", trace=str(trace.path), cluster=Cluster.parse(cluster), **settings))


def homes(plan: Plan) -> Any:
    assert plan.placement is not None
    return np.stack([plan.placement.holds(layer).argmax(axis=1) for layer in range(plan.placement.num_layers)])


def tokens(trace: Any) -> Any:
    return np.concatenate([batch.ids for batch in trace.batches()]).astype(int)


def test_where_tokens_return_home_the_objective_is_the_pairs_of_a_tokens_experts(make_trace: Any) -> None:
    trace = make_trace(samples=40, tokens=20, top_k=3)
    plan, kept, total = made(trace, dispatch_model="standard", method="annealing"), 0, 0
    device = homes(plan)
    for token in tokens(trace):
        for layer, (a, b, c) in enumerate(token):
            kept += sum(device[layer, i] == device[layer, j] for i, j in ((a, b), (a, c), (b, c)))
            total += 3
    objective = plan.outcome["placement"].objective
    assert objective.name == "affinity_kept"
    assert objective.value == pytest.approx(kept / total)
    certificate = certify(plan, trace.path)
    assert {"objective", "bound", "cap on loads"} <= {*certificate.checks}


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_k": 2, "method": "sweeps"}, {"top_k": 2, "redundant": 4}])
def test_tokens_of_one_expert_other_methods_and_replicas_are_planned_under_standard_too(
    make_trace: Any, changes: dict[str, Any]
) -> None:
    trace = make_trace(samples=40, top_k=changes.pop("top_k"))
    plan = made(trace, dispatch_model="standard", **changes)
    name = plan.outcome["placement"].objective.name
    assert name == ("expected_affinity_kept" if "redundant" in changes else "hops_kept")
    certify(plan, trace.path)


def test_no_device_of_a_capped_plan_holds_more_than_the_cap_of_the_fitted_tokens(make_trace: Any) -> None:
    trace = make_trace(samples=60, tokens=20)
    plan = made(trace, max_load=1.2)
    device, ids = homes(plan), tokens(trace)
    for layer in range(ids.shape[1]):
        load = np.bincount(device[layer][ids[:, layer].ravel()], minlength=4)
        assert load.max() <= 1.2 * load.mean() * (1 + 1e-9)
    certificate = certify(plan, trace.path)
    assert "cap on loads" in certificate.checks
    assert "that the cap is what was asked for, and what it costs" in certificate.unchecked
    assert "\ncapped    at 1.2 of a layer's mean load per device; without, " in said(plan)


def test_a_cap_that_no_placement_keeps_is_refused_with_one_that_is_kept(make_trace: Any) -> None:
    trace = make_trace(samples=60, tokens=20)
    with pytest.raises(UsageError, match=r"max load 1.*; give \d\.\d+ or more") as refused:
        made(trace, max_load=1.0)
    least = float(str(refused.value).split("give ")[1].split()[0])
    assert made(trace, max_load=least).placement is not None


def test_stages_are_told_on_two_levels_of_links_and_the_last_is_the_plan(make_trace: Any) -> None:
    trace = make_trace(samples=60, tokens=20)
    plan = made(trace, "2x2")
    device, ids = homes(plan), tokens(trace)[:, :, 0]
    hops = [(device[i][ids[:, i]], device[i + 1][ids[:, i + 1]]) for i in range(ids.shape[1] - 1)]
    far = np.mean([here // 2 != there // 2 for here, there in hops])
    near = np.mean([(here // 2 == there // 2) & (here != there) for here, there in hops])
    stages = plan.options["placement"]["search"]["stages"]
    assert [stage["name"] for stage in stages] == ["nodes", "devices", "joint"]
    assert (stages[2]["inter_hops"], stages[2]["intra_hops"]) == (pytest.approx(far), pytest.approx(near))
    assert "last stage" in certify(plan, trace.path).checks
    assert re.search(r"\nnodes .*\ndevices .*\njoint ", said(plan))
    assert made(trace).options["placement"]["search"]["stages"] == []


def test_a_thorough_bound_is_no_looser_than_the_simple_one_and_certify_says_what_it_cannot_tell(
    make_trace: Any,
) -> None:
    trace = make_trace(samples=60, tokens=20, layers=4)
    simple, thorough = (made(trace, bound=bound).outcome["placement"] for bound in ("simple", "thorough"))
    plan = made(trace, bound="thorough")
    assert simple.bound is not None
    assert thorough.bound is not None
    assert thorough.bound < simple.bound
    assert thorough.bound_kind == "three-layer"
    assert any("three-layer" in what for what in certify(plan, trace.path).unchecked)


def _looser(outcome: Any) -> Any:
    bound = outcome["bound"] * 1.5
    return {**outcome, "bound": bound, "gap": 1 - outcome["objective"]["value"] / bound}


@pytest.mark.parametrize(
    ("changes", "path", "change"),
    [
        ({"max_load": 1.2}, "options.placement.search.cap.max_load", lambda _: 1.0001),
        ({"cluster": "2x2"}, "options.placement.search.stages.2.inter_hops", lambda x: x * 0.99),
        ({"cluster": "2x2"}, "options.placement.search.stages.0.inter_hops", lambda x: x * 0.99),
        ({"cluster": "2x2"}, "options.placement.search.stages", lambda x: x[1:]),
        ({"bound": "thorough"}, "outcome.placement", _looser),
        ({"dispatch_model": "standard"}, "outcome.placement.objective.name", lambda _: "hops_kept"),
        ({"dispatch_model": "standard"}, "outcome.placement.objective.value", lambda x: x * 0.999),
        ({}, "options.placement.search.bound", lambda _: "perfect"),
    ],
)
def test_a_forged_search_is_refused(
    make_trace: Any, changes: dict[str, Any], path: str, change: Callable[[Any], Any]
) -> None:
    trace = make_trace(samples=60, tokens=20, layers=4)
    plan = made(trace, **changes)
    certify(plan, trace.path)
    with pytest.raises(CertificationError):
        certify(edited(plan, path, change), trace.path)
