"""The objective `copies` of coherent dispatch: pairs of experts that save a token copies, counted and certified."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moeplan.errors import CertificationError
from moeplan.planner.certify import certify
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Plan
from moeplan.traces.reader import Trace
from moeplan.traces.schema import TokenBatch
from tests.builders import model
from tests.planner.makers import edited, said, stored_tokens

DROPPED = 65_535


def made(trace: Any, cluster: str = "1x4", **changes: Any) -> Plan:
    settings: dict[str, Any] = {"fit_fraction": 1.0} | changes
    return solve(Request.of(strategy="exflow", trace=str(trace.path), cluster=Cluster.parse(cluster), **settings))


def homes(plan: Plan) -> Any:
    assert plan.placement is not None
    return np.stack([plan.placement.holds(layer).argmax(axis=1) for layer in range(plan.placement.num_layers)])


def pairs_of(token: Any) -> list[tuple[int, int, int, int]]:
    """The pairs that count of a token `[L, K]`, as layer and expert twice: its experts, each with the first before."""
    found = []
    for layer, experts in enumerate(token.tolist()):
        found += [(layer, one, layer, other) for one, other in itertools.combinations(experts, 2)]
        if layer:
            found += [(layer - 1, int(token[layer - 1, 0]), layer, expert) for expert in experts]
    return [pair for pair in found if DROPPED not in pair]


def copies(plan: Plan, name: str = "plan/coherent") -> float:
    assert plan.evaluation is not None
    (found,) = (one for one in plan.evaluation.fit.contenders if one.label == name)
    return found.metrics["device_copies"].value


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Experts 0 to 3 are first choices in a loose order; each takes its own of the experts 4 to 7 along."""
    rng, tokens, layers = np.random.default_rng(0), 2000, 4
    first = np.cumsum(rng.random((tokens, layers)) < 0.6, axis=1) % 4
    ids = np.stack([first, 4 + (first + np.arange(layers)) % 4], axis=2).astype(np.uint16)
    folder = tmp_path_factory.mktemp("planted")
    batch = TokenBatch(
        step=None,
        sample=np.arange(tokens) // 20,
        position=(np.arange(tokens) % 20).astype(np.int32),
        source_rank=None,
        phase=np.zeros(tokens, np.int8),
        ids=ids,
    )
    return stored_tokens(folder, model(layers), batch)


@pytest.mark.parametrize("cluster", ["1x4", "2x2"])
@pytest.mark.parametrize("unrouted", [0.0, 0.1])
def test_the_objective_is_the_share_of_pairs_kept_as_a_loop_over_tokens_counts_them(
    make_trace: Any, cluster: str, unrouted: float
) -> None:
    trace = make_trace(samples=30, tokens=10, top_k=3, unrouted=unrouted)
    plan, rho = made(trace, cluster, objective="copies"), 8.0
    device, group = homes(plan), Cluster.parse(cluster).devices_per_node
    costs = []
    for token in np.concatenate([batch.ids for batch in trace.batches()]).astype(int):
        for layer, one, other_layer, other in pairs_of(token):
            here, there = device[layer, one], device[other_layer, other]
            costs.append(0.0 if here == there else 1.0 if here // group == there // group else rho)
    objective = plan.outcome["placement"].objective
    assert objective.name == ("affinity_kept" if cluster == "1x4" else "affinity_cost")
    assert objective.value == pytest.approx(1 - np.mean(costs) if cluster == "1x4" else np.mean(costs))
    assert {"objective", "bound"} <= {*certify(plan, trace.path).checks}
    assert "a token's experts" in said(plan)


def test_pairs_that_no_first_choices_tell_of_save_copies(planted: Trace) -> None:
    hops, pairs = (made(planted, objective=objective) for objective in ("hops", "copies"))
    assert copies(pairs) < 0.8 * copies(hops)
    assert copies(hops) < copies(hops, "contiguous/coherent")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("hops", "hops_kept")),
        ({"objective": "copies"}, ("copies", "affinity_kept")),
        ({"dispatch_model": "standard"}, ("copies", "affinity_kept")),
        ({"dispatch_model": "standard", "objective": "hops"}, ("hops", "hops_kept")),
        ({"method": "sweeps", "dispatch_model": "standard"}, ("hops", "hops_kept")),
        ({"objective": "copies", "redundant": 4}, ("copies", "expected_affinity_kept")),
    ],
    ids=str,
)
def test_what_was_optimised_is_told(make_trace: Any, changes: dict[str, Any], expected: tuple[str, str]) -> None:
    trace = make_trace()
    plan = made(trace, **changes)
    assert (plan.options["placement"]["search"]["objective"], plan.outcome["placement"].objective.name) == expected
    certify(plan, trace.path)


def test_of_one_expert_a_token_copies_are_hops(make_trace: Any) -> None:
    trace = make_trace(top_k=1)
    plan, same = (made(trace, objective=objective) for objective in ("hops", "copies"))
    assert plan.options == same.options
    assert plan.decisions == same.decisions


def test_the_options_of_two_runs_are_alike(make_trace: Any) -> None:
    trace = make_trace()
    assert made(trace).options == made(trace).options


def _tighter(outcome: Any) -> Any:
    value = outcome["objective"]["value"]
    return {**outcome, "bound": value * 1.01, "gap": 1 - 1 / 1.01}


@pytest.mark.parametrize(
    ("cluster", "path", "change"),
    [
        ("1x4", "options.placement.search.objective", lambda _: "hops"),
        ("1x4", "options.placement.search.objective", lambda _: "speed"),
        ("1x4", "options.placement.search", lambda _: None),
        ("1x4", "outcome.placement.objective.name", lambda _: "hops_kept"),
        ("1x4", "outcome.placement.objective.value", lambda x: x * 0.999),
        ("1x4", "outcome.placement", _tighter),
        ("2x2", "outcome.placement.objective.value", lambda x: x * 1.001),
        ("2x2", "options.placement.search.stages.2.intra_hops", lambda x: x + 0.01),
    ],
)
def test_an_edited_objective_is_refused(make_trace: Any, cluster: str, path: str, change: Callable[[Any], Any]) -> None:
    trace = make_trace(samples=30, tokens=10, layers=4, top_k=3)
    plan = made(trace, cluster, objective="copies")
    certify(plan, trace.path)
    with pytest.raises(CertificationError):
        certify(edited(plan, path, change), trace.path)
