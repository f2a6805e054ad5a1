"""ExFlow's searches, sweeps and annealing: what each step gains and keeps, and what ends it."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
from moeplan.solvers.bounds import KeptBound
from moeplan.solvers.cost import hops_kept
from moeplan.solvers.exflow import methods
from moeplan.solvers.exflow.budget import Budget, layer_work
from moeplan.solvers.exflow.methods import SWEEPS_WORK, Run, improve, staged
from moeplan.solvers.exflow.programme import Incumbent, Layout, Programme, Terms
from moeplan.solvers.exflow.rounds import recombine
from moeplan.solvers.exflow.sweeps import chain, polish, relabel, search, sweep
from moeplan.solvers.outcome import Status
from tests.solvers.builders import TWO_NODES, Array, brute_force, homes, programme_of, skewed


def value_by_loops(programme: Programme, layout: Layout) -> float:
    return sum(
        float(weight[a, b] * programme.near[layout[cut][a], layout[cut + 1][b]])
        for cut, weight in enumerate(programme.weights)
        for a in range(len(weight))
        for b in range(weight.shape[1])
    )


def kept_on_nodes(programme: Programme, layout: Layout) -> float:
    cuts = list(enumerate(programme.weights))
    kept = sum(float(w[layout[cut][:, None] // 2 == layout[cut + 1] // 2].sum()) for cut, w in cuts)
    return kept / sum(float(w.sum()) for _, w in cuts)


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(2, 4))
def test_with_one_expert_a_device_the_chain_is_optimal(seed: int, num_layers: int, num_experts: int) -> None:
    rng = np.random.default_rng(seed)
    weights = skewed(rng, num_layers, num_experts)
    programme = programme_of(weights, [1] * num_experts)
    layout = chain(programme, int(rng.integers(num_layers)), Budget(1e9, 1e6), rng)
    assert programme.value(layout) == brute_force(weights, [1] * num_experts, programme.near)


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from([[4, 4, 4, 4], [5, 1, 7, 3], [6, 6, 6, 6], [0, 16, 2, 9]]), st.booleans())
def test_sweeps_and_relabelling_never_lose_value_nor_leave_slots(seed: int, slots: list[int], two_nodes: bool) -> None:
    rng = np.random.default_rng(seed)
    near, group = (TWO_NODES, 2) if two_nodes else (None, None)
    programme = programme_of(skewed(rng, 5, 16), slots, near, group)
    budget = Budget(1e9, 1e6)
    layout = chain(programme, 2, budget, rng)
    values = [programme.value(layout)]
    for step in (
        lambda: sweep(programme, layout, budget, [1, 3]),
        lambda: relabel(programme, layout, budget),
        lambda: polish(programme, layout, budget),
    ):
        step()
        values.append(programme.value(layout))
        assert all((np.bincount(device, minlength=4) <= slots).all() for device in layout)
    assert values == sorted(values)
    assert values[-1] == pytest.approx(value_by_loops(programme, layout))


def test_relabelling_undoes_any_renaming_that_the_links_are_blind_to(rng: Generator) -> None:
    programme = programme_of(np.stack([np.kron(np.eye(4), np.ones((2, 2)))] * 2), [2, 2, 2, 2], TWO_NODES, 2)
    layout = programme.first_layout()
    best = programme.value(layout)
    layout[1:] = [np.array([3, 2, 0, 1])[device] for device in layout[1:]]
    assert programme.value(layout) < best
    assert relabel(programme, layout, Budget(1e9, 1e6))
    assert programme.value(layout) == best


@pytest.mark.parametrize(("near", "group"), [(np.eye(2), 2), (5 * np.eye(2), 1)])
def test_the_search_finds_the_optimum_of_small_programmes(rng: Generator, near: Array, group: int) -> None:
    for slots in ([2, 2], [3, 1], [3, 2]):
        weights = skewed(rng, 4, 4)
        programme = programme_of(weights, slots, near, group)
        incumbent = Incumbent(programme)
        search(programme, Terms(), Budget(2e7, 1e6), rng, incumbent)
        assert incumbent.value == pytest.approx(brute_force(weights, slots, near))


def test_kicks_gain_over_polished_chains(rng: Generator) -> None:
    programme = programme_of(skewed(rng, 8, 16), [4, 4, 4, 4])
    budget = Budget(1e9, 1e6)
    layout = chain(programme, 0, budget, rng)
    polish(programme, layout, budget)
    incumbent = Incumbent(programme)
    search(programme, Terms(), Budget(2e8, 1e6), rng, incumbent)
    assert incumbent.value > programme.value(layout)
    assert incumbent.value == pytest.approx(value_by_loops(programme, incumbent.layout))


def test_the_staged_layout_puts_experts_that_share_a_node_first(rng: Generator) -> None:
    blocks = np.kron(np.eye(2), np.ones((4, 4))) * 10 + np.kron(np.eye(4), np.ones((2, 2)))
    mixed = [rng.permutation(8) for _ in range(4)]
    weights = np.stack([blocks[np.ix_(mixed[cut], mixed[cut + 1])] for cut in range(3)])
    programme = programme_of(weights, [2, 2, 2, 2], TWO_NODES, 2)
    layout, stages = staged(programme, Terms(), Budget(1e8, 1e6), rng, improve)
    best = [np.arange(8)[order] // 2 for order in mixed]
    assert programme.value(layout) == pytest.approx(programme.value(best))
    assert stages[0].inter_hops == stages[1].inter_hops == pytest.approx(1 - kept_on_nodes(programme, best))


def test_every_layer_of_a_chain_is_charged_and_a_spent_budget_ends_what_comes_after(rng: Generator) -> None:
    programme, budget = programme_of(rng.dirichlet(np.full(16, 0.2), (4, 16)), [4] * 4), Budget(1.0, 1e6)
    layout = chain(programme, 2, budget, rng)
    assert budget.total - budget.left == 4 * layer_work(16, 16)
    assert all(np.bincount(home_E).tolist() == [4] * 4 for home_E in layout)
    before = list(layout)
    polish(programme, layout, budget)
    assert all(now_E is was_E for now_E, was_E in zip(layout, before, strict=True))
    assert not relabel(programme, layout, budget)
    assert budget.total - budget.left == 4 * layer_work(16, 16)


@settings(max_examples=6)
@given(st.integers(0, 99), st.sampled_from([[2, 2, 2], [3, 1, 2], [3, 3], [4, 3]]))
def test_annealing_finds_the_optimum_of_small_programmes(seed: int, slots: list[int]) -> None:
    weights = skewed(seed, 4, 6)
    programme = programme_of(weights, slots)
    incumbent = Incumbent(programme)
    improve(programme, Terms(), Budget(2e8, 1e6), np.random.default_rng(seed), incumbent)
    assert incumbent.value == brute_force(weights, slots, programme.near)


def busy_and_idle(num_layers: int, num_experts: int) -> Array:
    """Transitions of few ways on, of experts of which the busiest has some hundred times the tokens of the idlest."""
    rng = np.random.default_rng(0)
    rows = rng.dirichlet(np.full(num_experts, 0.03), (num_layers - 1, num_experts))
    return np.asarray(rows / rng.permutation(np.arange(1, num_experts + 1))[:, None])


@pytest.mark.parametrize(
    ("weights", "slots"), [(skewed(0, 12, 32), 4), (busy_and_idle(6, 64), 4), (busy_and_idle(12, 64), 8)]
)
def test_annealing_keeps_more_than_sweeps_of_the_work_of_both_its_threads(weights: Array, slots: int) -> None:
    programme = programme_of(weights, [slots] * (weights.shape[1] // slots))
    annealed, swept = Incumbent(programme), Incumbent(programme)
    improve(programme, Terms(), Budget(1e9, 1e6), np.random.default_rng(0), annealed)
    search(programme, Terms(), Budget(2e9, 1e6), np.random.default_rng(0), swept)
    assert annealed.value > swept.value


@pytest.mark.parametrize("cluster", [Cluster(1, 4), Cluster(2, 2)])
def test_annealing_goes_on_from_what_sweeps_find_in_little(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = skewed(3, 6, 16)
    swept = exflow.solve(weights, cluster, method="sweeps", time_limit_s=1e3, seed=5)
    for name in ("improve", "anneal"):
        monkeypatch.setattr(f"moeplan.solvers.exflow.methods.{name}", lambda *_: None)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    enough, short = (
        exflow.solve(weights, cluster, work=work, time_limit_s=1e4, seed=5) for work in (SWEEPS_WORK * 5, SWEEPS_WORK)
    )
    assert (enough.placement.physical_to_logical == swept.placement.physical_to_logical).all()
    assert (short.placement.physical_to_logical != swept.placement.physical_to_logical).any()
    for name in ("improve", "anneal"):
        monkeypatch.setattr(f"moeplan.solvers.exflow.methods.{name}", interrupted)
    found = exflow.solve(weights, cluster, work=SWEEPS_WORK * 5, time_limit_s=1e4, seed=5)
    assert (found.outcome.status, found.stages) == (Status.INTERRUPTED, ())
    assert found.outcome.objective == swept.outcome.objective


def test_what_sweeps_take_first_is_charged_and_where_time_ends_them_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    programme = programme_of(skewed(3, 12, 32), [4] * 8)
    alone, bound, runs = Budget(SWEEPS_WORK, 1e4), KeptBound(np.inf, frozenset()), []
    search(programme, Terms(), alone, np.random.default_rng(5), Incumbent(programme))
    for share in (0.4, 1e-5):
        monkeypatch.setattr(methods, "SWEEPS_TIME_SHARE", share)
        runs.append(Run(programme, Terms(), Incumbent(programme), bound, Budget(SWEEPS_WORK * 5, 1e4), seed=5))
        runs[-1]._sweep_first()
    spent, hurried = (run.budget.total - run.budget.left for run in runs)
    assert spent == pytest.approx(alone.total - alone.left)
    assert 0 < hurried < spent
    assert [run.budget.capped for run in runs] == [False, True]


def test_more_work_keeps_more_and_every_improvement_is_reported_in_turn() -> None:
    programme = programme_of(skewed(1, 8, 32), [4] * 8)
    values = []
    for work in (1e5, 5e7):
        seen: list[float] = []
        incumbent = Incumbent(programme, on_improvement=seen.append)
        improve(programme, Terms(), Budget(work, 1e6), np.random.default_rng(0), incumbent)
        assert seen == sorted(seen)
        assert seen[-1] == incumbent.value == programme.value(incumbent.layout)
        values.append(incumbent.value)
    assert values[0] < values[1]


@pytest.mark.parametrize("cluster", [Cluster(1, 4), Cluster(2, 2)])
@pytest.mark.parametrize("slots", [4, 5])
def test_a_seed_and_a_work_budget_give_the_same_placement_again_whatever_the_time(cluster: Cluster, slots: int) -> None:
    weights = skewed(2, 5, 16)
    first, again = (
        exflow.solve(weights, cluster, slots=slots, work=4e6, time_limit_s=limit, seed=4) for limit in (100, 200)
    )
    other = exflow.solve(weights, cluster, slots=slots, work=1e5, time_limit_s=100, seed=5)
    assert first.outcome.status is Status.FEASIBLE
    assert (first.placement.physical_to_logical == again.placement.physical_to_logical).all()
    assert (first.placement.physical_to_logical != other.placement.physical_to_logical).any()


def joined_by_brute_force(programme: Programme, terms: Terms, layouts: list[Layout]) -> float:
    """The best value over all choices of a layout for each layer and all names of devices, layer by layer."""
    renamed = map(np.array, itertools.permutations(range(len(programme.slots))))
    names = [name for name in renamed if (programme.near[name][:, name] == programme.near).all()]
    best = {(i, tuple(layout[0])): terms.inside(programme, layout, 0) for i, layout in enumerate(layouts)}
    for cut, weight in enumerate(programme.weights):
        after: dict[tuple[int, tuple[int, ...]], float] = {}
        for i, name in itertools.product(range(len(layouts)), names):
            there = name[layouts[i][cut + 1]]
            after[i, tuple(there)] = max(
                value + float((weight * programme.near[np.array(here)[:, None], there]).sum())
                for (_, here), value in best.items()
            ) + terms.inside(programme, layouts[i], cut + 1)
        best = after
    return max(best.values())


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("devices", "near", "group"), [(3, np.eye(3), 3), (4, TWO_NODES, 2)])
def test_recombining_takes_the_best_layers_and_device_names(
    devices: int, near: Array, group: int, paired: bool
) -> None:
    rng = np.random.default_rng(5)
    weights = list(skewed(5, 4, 2 * devices).astype(float))
    programme = Programme(weights, (2 * devices,) * 4, np.full(devices, 2), near, group)
    half = rng.integers(0, 200, (4, 2 * devices, 2 * devices)).astype(float)
    terms = Terms(beside=half + half.transpose(0, 2, 1)) if paired else Terms()
    layouts = [[rng.permutation(programme.places) for _ in range(4)] for _ in range(3)]
    found = recombine(programme, terms, layouts)
    assert terms.value(programme, found) == joined_by_brute_force(programme, terms, layouts)
    assert all(np.bincount(device).tolist() == [2] * devices for device in found)


def test_pairs_that_can_never_meet_leave_one_expert_a_device_proven() -> None:
    weights, pairs = skewed(3, 4, 6), np.full((4, 6, 6), 5) - 5 * np.eye(6, dtype=int)
    alone = exflow.solve(weights, Cluster(1, 6)).outcome
    found = exflow.solve(weights, Cluster(1, 6), coactivation=pairs).outcome
    assert (found.status, found.gap) == (Status.OPTIMAL, 0)
    total = weights.sum() + pairs.sum() / 2
    assert found.objective.value * total == pytest.approx(alone.objective.value * weights.sum())


def test_one_expert_a_device_is_not_called_optimal_with_two_levels_of_links() -> None:
    assert exflow.solve(skewed(6, 3, 6), Cluster(2, 3), work=1e6).outcome.bound_kind != "assignment"


@pytest.mark.parametrize("cluster", [Cluster(1, 4), Cluster(2, 2)])
def test_no_device_holds_more_than_the_cap_and_what_that_costs_shows(cluster: Cluster) -> None:
    weights = skewed(7, 6, 16)
    loads = np.random.default_rng(7).random((6, 16)) + 1
    free, capped = (
        exflow.solve(weights, cluster, loads=loads, max_load=cap, work=2e7, time_limit_s=100) for cap in (None, 1.02)
    )
    for found, limit in ((free, np.inf), (capped, 1.02)):
        held = np.stack([np.bincount(d, w, 4) for d, w in zip(homes(found.placement), loads, strict=True)])
        assert (held.max(axis=1) / held.mean(axis=1)).max() <= limit * (1 + 1e-6)
    worse, better = (found.outcome.objective.value for found in (capped, free))
    assert worse < better if cluster.num_nodes == 1 else worse > better


@pytest.mark.parametrize("options", [{"max_load": 0.9}, {"max_load": float("nan")}, {"max_load": 2, "slots": 3}])
def test_caps_without_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"max load .*expected 1 or more"):
        exflow.solve(skewed(8, 3, 4), Cluster(1, 2), **options)


@pytest.mark.parametrize("options", [{"coactivation": np.ones((3, 4, 4))}, {"max_load": 2}])
def test_sweeps_refuse_what_they_know_nothing_of(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected annealing"):
        exflow.solve(skewed(8, 3, 4), Cluster(1, 2), method="sweeps", **options)


def test_two_levels_of_links_report_hops_after_nodes_devices_and_the_joint_polish() -> None:
    weights = skewed(9, 6, 16)
    found = exflow.solve(weights, Cluster(2, 4), work=2e7, time_limit_s=100)
    assert [stage.name for stage in found.stages] == ["nodes", "devices", "joint"]
    nodes, devices, joint = found.stages
    assert nodes.inter_hops == devices.inter_hops
    assert devices.intra_hops < nodes.intra_hops
    assert 8 * joint.inter_hops + joint.intra_hops <= 8 * devices.inter_hops + devices.intra_hops
    kept, total = hops_kept(weights.astype(float), found.placement, 4), weights.sum()
    assert joint.inter_hops == pytest.approx(1 - kept.node.sum() / total)
    assert joint.intra_hops == pytest.approx((kept.node.sum() - kept.device.sum()) / total)
    assert exflow.solve(weights, Cluster(1, 8), work=1e6).stages == ()


def test_coactivation_and_transitions_add_up_in_the_objective() -> None:
    weights, rng = skewed(11, 3, 8), np.random.default_rng(11)
    pairs = rng.integers(0, 90, (3, 8, 8)).astype(float)
    found = exflow.solve(weights, Cluster(2, 2), coactivation=pairs, work=1e7, time_limit_s=100)
    device, cost, total = homes(found.placement), 0.0, 0.0
    joined = [(weights[cut], device[cut], device[cut + 1]) for cut in range(2)]
    inside = [(np.triu(pairs[layer] + pairs[layer].T, 1) / 2, device[layer], device[layer]) for layer in range(3)]
    for weight, here, there in [*joined, *inside]:
        apart = here[:, None] // 2 != there // 2
        cost += float((weight * np.where(apart, 8.0, here[:, None] != there)).sum())
        total += float(weight.sum())
    assert found.outcome.objective.name == "affinity_cost"
    assert found.outcome.objective.value == pytest.approx(cost / total)


def test_the_start_of_an_annealing_takes_three_tenths_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, programme = list[float](), programme_of(skewed(0, 5, 16), [4] * 4)
    monkeypatch.setattr(methods, "start", lambda _, part, *__, **___: parts.append(part.total))
    monkeypatch.setattr(methods, "anneal", lambda *_: None)
    improve(programme, Terms(), Budget(1e9, 1e6), np.random.default_rng(0), Incumbent(programme))
    assert parts == pytest.approx([3e8])
