"""What exflow keeps together, under both dispatch models; caps, stages and bounds; and what needs first choices."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import UsageError
from moeplan.planner.certify import certify
from moeplan.planner.compare import compare
from moeplan.profilers.cluster import Cluster
from moeplan.traces.schema import TokenBatch
from tests.builders import model
from tests.planner.makers import assert_refused, edited, planned, rewritten, said, seconds, stored_tokens, tokens

DROPPED = 65_535


def fitted(trace: Any, cluster: str = "1x4", **settings: Any) -> Any:
    """A plan fitted to all of a trace."""
    return planned(trace, "exflow", cluster, **{"fit_fraction": 1.0} | settings)


def homes(plan: Any) -> Any:
    """The device of every expert, `[L, E]`."""
    return np.stack([plan.placement.holds(layer).argmax(axis=1) for layer in range(plan.placement.num_layers)])


def search(plan: Any) -> Any:
    return plan.options["placement"]["search"]


def objective(plan: Any) -> Any:
    return plan.outcome["placement"].objective


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
    assert (objective(plan).name, objective(plan).value) == (name, pytest.approx(value))
    assert {"objective", "bound"} <= {*certify(plan, trace.path).checks}
    assert "a token's experts" in said(plan)


def test_pairs_that_no_first_choices_tell_of_save_copies(tmp_path: Path) -> None:
    """Experts 0 to 3 are first choices in a loose order; each takes its own of the experts 4 to 7 along."""
    first = np.cumsum(np.random.default_rng(0).random((2000, 4)) < 0.6, axis=1) % 4
    ids = np.stack([first, 4 + (first + np.arange(4)) % 4], axis=2).astype(np.uint16)
    sample, position = np.divmod(np.arange(2000), 20)
    batch = TokenBatch(None, sample, position.astype(np.int32), None, np.zeros(2000, np.int8), ids)
    trace = stored_tokens(tmp_path, model(4), batch)
    hops, pairs = (fitted(trace, objective=objective) for objective in ("hops", "copies"))
    copies = [seconds(plan, "plan/coherent", "device_copies") for plan in (pairs, hops)]
    assert copies[0] < 0.8 * copies[1]
    assert copies[1] < seconds(hops, "contiguous/coherent", "device_copies")


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
    assert (search(plan)["objective"], objective(plan).name) == expected
    certify(plan, trace.path)


def test_of_one_expert_a_token_copies_are_hops_and_two_runs_are_alike(make_trace: Any) -> None:
    trace = make_trace(top_k=1)
    plan, same, again = (fitted(trace, objective=objective) for objective in ("hops", "copies", "hops"))
    assert plan.options == same.options == again.options
    assert plan.decisions == same.decisions == again.decisions


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    return make_trace(samples=60, tokens=20, layers=4)


def test_no_device_of_a_capped_plan_holds_more_than_the_cap_of_the_fitted_tokens(trace: Any) -> None:
    plan = fitted(trace, max_load=1.2)
    for device, ids in zip(homes(plan), tokens(trace).swapaxes(0, 1), strict=True):
        load = np.bincount(device[ids.ravel()], minlength=4)
        assert load.max() <= 1.2 * load.mean() * (1 + 1e-9)
    certificate = certify(plan, trace.path)
    assert {"objective", "bound", "cap on loads"} <= {*certificate.checks}
    assert "that the cap is what was asked for, and what it costs" in certificate.unchecked
    assert "\ncapped    at 1.2 of a layer's mean load per device; without, " in said(plan)


def test_a_cap_that_no_placement_keeps_is_refused_with_one_that_is_kept(trace: Any) -> None:
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
    assert re.search(r"\nnodes .*\ndevices .*\njoint ", said(plan))
    assert search(fitted(trace))["stages"] == []


def test_a_thorough_bound_is_tighter_than_the_simple_one(trace: Any) -> None:
    simple, thorough = (fitted(trace, bound=bound).outcome["placement"] for bound in ("simple", "thorough"))
    assert thorough.bound < simple.bound
    assert thorough.bound_kind == "three-layer"


def with_bound(factor: float) -> Any:
    """An outcome with a bound of so much of its own."""

    def changed(outcome: Any) -> Any:
        bound = outcome["bound"] * factor
        return {**outcome, "bound": bound, "gap": 1 - outcome["objective"]["value"] / bound}

    return changed


def at_value(outcome: Any) -> Any:
    """An outcome whose bound is almost reached."""
    return {**outcome, "bound": outcome["objective"]["value"] * 1.01, "gap": 1 - 1 / 1.01}


SEARCH, OUTCOME = "options.placement.search", "outcome.placement"


@pytest.mark.parametrize(
    ("settings", "path", "change"),
    [
        ({"max_load": 1.2}, f"{SEARCH}.cap.max_load", 1.0001),
        ({"cluster": "2x2"}, f"{SEARCH}.stages.2.inter_hops", lambda x: x * 0.99),
        ({"cluster": "2x2"}, f"{SEARCH}.stages.0.inter_hops", lambda x: x * 0.99),
        ({"cluster": "2x2"}, f"{SEARCH}.stages", lambda x: x[1:]),
        ({"cluster": "2x2"}, f"{SEARCH}.stages.0.intra_hops", lambda x: 0.0),
        ({"bound": "thorough"}, OUTCOME, with_bound(1.5)),
        ({"dispatch_model": "standard"}, f"{OUTCOME}.objective.name", "hops_kept"),
        ({"dispatch_model": "standard"}, f"{OUTCOME}.objective.value", lambda x: x * 0.999),
        ({}, f"{SEARCH}.bound", "perfect"),
        ({"objective": "copies"}, f"{SEARCH}.objective", "hops"),
        ({"objective": "copies"}, f"{SEARCH}.objective", "speed"),
        ({"objective": "copies"}, SEARCH, None),
        ({"objective": "copies"}, f"{OUTCOME}.objective.name", "hops_kept"),
        ({"objective": "copies"}, f"{OUTCOME}.objective.value", lambda x: x * 0.999),
        ({"objective": "copies"}, OUTCOME, at_value),
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
def test_what_follows_first_choices_is_refused_where_they_are_unknown(
    unordered: Any, settings: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        planned(unordered, **settings)


def test_what_needs_no_first_choice_is_planned_as_from_an_ordered_trace(
    make_trace: Any, trace: Any, unordered: Any, tmp_path: Path
) -> None:
    one, other = (planned(form, "eplb") for form in (trace, unordered))
    assert one.decisions == other.decisions
    assert planned(unordered, dispatch_model="standard").placement is not None
    single = rewritten(make_trace(samples=12, top_k=1), tmp_path / "single", choice_order="unknown")
    assert planned(single).placement is not None
    fitted(trace, to=tmp_path / "plan.json")
    with pytest.raises(UsageError, match=r"plan\.json, a coherent plan, needs to know the first"):
        compare([tmp_path / "plan.json"], unordered.path)
