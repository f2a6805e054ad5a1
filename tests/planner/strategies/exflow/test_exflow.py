"""What exflow keeps together, under both dispatch models; caps, stages and bounds; and what needs first choices."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import UsageError
from moeplan.planner.certify import certify
from moeplan.planner.compare import compare
from moeplan.profilers.cluster import Cluster
from tests.planner.makers import assert_refused, edited, planned, rewritten, said, tokens

DROPPED = 65_535


def fitted(trace: Any, cluster: str = "1x4", **settings: Any) -> Any:
    """A plan fitted to all of a trace."""
    return planned(trace, "exflow", cluster, **{"fit_fraction": 1.0} | settings)


def homes(plan: Any) -> Any:
    """The device of every expert, `[L, E]`."""
    return np.stack([plan.placement.holds(layer).argmax(axis=1) for layer in range(plan.placement.num_layers)])


def search(plan: Any) -> Any:
    return plan.options["placement"]["search"]


def pairs_of(token: Any) -> list[tuple[int, int, int, int]]:
    """The pairs that count of a token `[L, K]`, as layer and expert twice: its experts, each with the first before."""
    pairs = []
    for layer, experts in enumerate(token.tolist()):
        pairs += [(layer, one, layer, other) for one, other in itertools.combinations(experts, 2)]
        if layer:
            pairs += [(layer - 1, int(token[layer - 1, 0]), layer, expert) for expert in experts]
    return [pair for pair in pairs if DROPPED not in pair]


@pytest.mark.parametrize("cluster", ["1x4", "2x2"])
@pytest.mark.parametrize("unrouted", [0.0, 0.1])
def test_copies_are_the_share_of_pairs_kept_as_a_loop_over_tokens_counts_them(
    make_trace: Any, cluster: str, unrouted: float
) -> None:
    trace = make_trace(samples=30, tokens=10, top_k=3, unrouted=unrouted)
    plan, rho = fitted(trace, cluster, objective="copies"), 8.0
    device, group = homes(plan), Cluster.parse(cluster).devices_per_node
    costs = []
    for token in tokens(trace):
        for layer, one, other_layer, other in pairs_of(token):
            here, there = device[layer, one], device[other_layer, other]
            costs.append(0.0 if here == there else 1.0 if here // group == there // group else rho)
    name, value = ("affinity_kept", 1 - np.mean(costs)) if cluster == "1x4" else ("affinity_cost", np.mean(costs))
    objective = plan.outcome["placement"].objective
    assert (objective.name, objective.value) == (name, pytest.approx(value))
    assert {"objective", "bound"} <= {*certify(plan, trace.path).checks}


@pytest.mark.parametrize(
    ("top_k", "changes", "expected"),
    [
        (2, {}, ("hops", "hops_kept")),
        (2, {"objective": "copies"}, ("copies", "affinity_kept")),
        (2, {"dispatch_model": "standard"}, ("copies", "affinity_kept")),
        (2, {"dispatch_model": "standard", "objective": "hops"}, ("hops", "hops_kept")),
        (2, {"dispatch_model": "standard", "method": "sweeps"}, ("hops", "hops_kept")),
        (2, {"dispatch_model": "standard", "redundant": 4}, ("copies", "expected_affinity_kept")),
        (2, {"objective": "copies", "redundant": 4}, ("copies", "expected_affinity_kept")),
        (1, {"dispatch_model": "standard"}, ("hops", "hops_kept")),
    ],
    ids=str,
)
def test_what_was_optimised_is_told(make_trace: Any, top_k: int, changes: Any, expected: tuple[str, str]) -> None:
    trace = make_trace(top_k=top_k)
    plan = fitted(trace, **changes)
    assert (search(plan)["objective"], plan.outcome["placement"].objective.name) == expected
    certify(plan, trace.path)


def test_of_one_expert_a_token_copies_are_hops(make_trace: Any) -> None:
    plan, same = (fitted(make_trace(top_k=1), objective=objective) for objective in ("hops", "copies"))
    assert (plan.options, plan.decisions) == (same.options, same.decisions)


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    return make_trace(samples=60, tokens=20, layers=4)


def test_no_device_of_a_capped_plan_holds_more_and_a_cap_that_none_keeps_is_refused(trace: Any) -> None:
    plan = fitted(trace, max_load=1.2)
    for device, ids in zip(homes(plan), tokens(trace).swapaxes(0, 1), strict=True):
        load = np.bincount(device[ids.ravel()], minlength=4)
        assert load.max() <= 1.2 * load.mean() * (1 + 1e-9)
    certificate = certify(plan, trace.path)
    assert {"objective", "bound", "cap on loads"} <= {*certificate.checks}
    assert "that the cap is what was asked for, and what it costs" in certificate.unchecked
    with pytest.raises(UsageError, match=r"max load 1.*; give \d\.\d+ or more") as refused:
        fitted(trace, max_load=1.0)
    least = float(str(refused.value).split("give ")[1].split()[0])
    assert fitted(trace, max_load=least).placement is not None


def test_stages_are_told_on_two_levels_of_links_and_the_last_is_the_plan(trace: Any) -> None:
    plan = fitted(trace, "2x2")
    device_LT = np.take_along_axis(homes(plan), tokens(trace)[:, :, 0].T, axis=1)
    here, there = device_LT[:-1], device_LT[1:]
    far, near = here // 2 != there // 2, (here // 2 == there // 2) & (here != there)
    stages = search(plan)["stages"]
    assert [stage["name"] for stage in stages] == ["nodes", "devices", "joint"]
    assert (stages[2]["inter_hops"], stages[2]["intra_hops"]) == pytest.approx((far.mean(), near.mean()))
    assert "last stage" in certify(plan, trace.path).checks
    assert "\njoint " in said(plan)
    assert search(fitted(trace))["stages"] == []


def bounded(outcome: Any, bound: float) -> Any:
    """An outcome with another bound."""
    return {**outcome, "bound": bound, "gap": 1 - outcome["objective"]["value"] / bound}


SEARCH, OUTCOME = "options.placement.search", "outcome.placement"


@pytest.mark.parametrize(
    ("settings", "path", "change"),
    [
        ({"max_load": 1.2}, f"{SEARCH}.cap.max_load", 1.0001),
        ({"cluster": "2x2"}, f"{SEARCH}.stages.2.inter_hops", lambda x: x * 0.99),
        ({"cluster": "2x2"}, f"{SEARCH}.stages.0.inter_hops", lambda x: x * 0.99),
        ({"cluster": "2x2"}, f"{SEARCH}.stages", lambda x: x[1:]),
        ({"cluster": "2x2"}, f"{SEARCH}.stages.0.intra_hops", lambda x: 0.0),
        ({"bound": "thorough"}, OUTCOME, lambda x: bounded(x, 1.5 * x["bound"])),
        ({"dispatch_model": "standard"}, f"{OUTCOME}.objective.name", "hops_kept"),
        ({}, f"{SEARCH}.bound", "perfect"),
        ({"objective": "copies"}, f"{SEARCH}.objective", "hops"),
        ({"objective": "copies"}, f"{SEARCH}.objective", "speed"),
        ({"objective": "copies"}, SEARCH, None),
        ({"objective": "copies"}, f"{OUTCOME}.objective.name", "hops_kept"),
        ({"objective": "copies"}, OUTCOME, lambda x: bounded(x, 1.01 * x["objective"]["value"])),
        ({"objective": "copies", "cluster": "2x2"}, f"{OUTCOME}.objective.value", lambda x: x * 1.001),
        ({"objective": "copies", "cluster": "2x2"}, f"{SEARCH}.stages.2.intra_hops", lambda x: x + 0.01),
    ],
)
def test_a_forged_search_is_refused(trace: Any, settings: Any, path: str, change: Any) -> None:
    plan = fitted(trace, **settings)
    certify(plan, trace.path)
    assert_refused(edited(plan, path, change), trace.path)


@pytest.fixture(scope="module")
def unordered(trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The trace, without knowing which expert of a token is its first."""
    return rewritten(trace, tmp_path_factory.mktemp("unordered"), choice_order="unknown")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "coherent dispatch needs to know the first"),
        ({"strategy": "contiguous", "dispatch_model": "coherent"}, "coherent dispatch needs"),
        ({"dispatch_model": "standard", "objective": "hops"}, "--objective hops needs"),
        ({"dispatch_model": "standard", "method": "sweeps"}, "--objective hops needs"),
    ],
)
def test_what_follows_first_choices_is_refused_without_them(unordered: Any, settings: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        planned(unordered, **settings)


def test_what_needs_no_first_choice_is_planned(make_trace: Any, trace: Any, unordered: Any, tmp_path: Path) -> None:
    assert planned(unordered, dispatch_model="standard").placement is not None
    single = rewritten(make_trace(samples=12, top_k=1), tmp_path / "single", choice_order="unknown")
    assert planned(single).placement is not None
    fitted(trace, to=tmp_path / "plan.json")
    with pytest.raises(UsageError, match=r"plan\.json, a coherent plan, needs to know the first"):
        compare([tmp_path / "plan.json"], unordered.path)
