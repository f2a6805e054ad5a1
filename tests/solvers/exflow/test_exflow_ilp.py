import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
from moeplan.solvers.exflow import strategy
from moeplan.solvers.exflow.ilp import Backend, solve_ilp, solve_paper
from moeplan.solvers.exflow.programme import Programme
from moeplan.solvers.outcome import Status

Array = NDArray[Any]
BruteForce = Callable[[Array, list[int], Array], float]
TWO_NODES = 8.0 - np.array([[0, 1, 8, 8], [1, 0, 8, 8], [8, 8, 0, 1], [8, 8, 1, 0]])
CASES = {
    "two devices": (4, [2, 2], np.eye(2), 2),
    "unequal slots": (4, [3, 1], np.eye(2), 2),
    "room to spare": (4, [3, 2], np.eye(2), 2),
    "two nodes of two": (4, [1, 1, 1, 1], TWO_NODES, 2),
    "nodes of one device": (4, [2, 2], 8 * np.eye(2), 1),
}


@pytest.mark.parametrize("backend", ["ortools", "pulp"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("whole", [True, False])
def test_both_backends_reach_brute_force_from_the_worst_start(
    brute_force: BruteForce, rng: np.random.Generator, backend: Backend, case: str, whole: bool
) -> None:
    num_experts, slots, near, group = CASES[case]
    weights = rng.dirichlet(np.full(num_experts, 0.4), (2, num_experts))
    weights = np.round(weights * 50) if whole else weights
    programme = Programme(list(weights), (num_experts,) * 3, np.array(slots), near, group)
    found = solve_ilp(programme, programme.first_layout(), backend, time_limit_s=60, seed=0)
    best = brute_force(weights, slots, near)
    assert programme.value(found.layout) == pytest.approx(best, rel=1e-9)
    assert found.bound == pytest.approx(best, rel=1e-9)
    assert all((np.bincount(device, minlength=len(slots)) <= slots).all() for device in found.layout)


@pytest.mark.parametrize("backend", ["ortools", "pulp"])
def test_the_method_ilp_proves_what_simple_bounds_cannot(rng: np.random.Generator, backend: Backend) -> None:
    weights = rng.poisson(rng.dirichlet(np.full(6, 0.5), (2, 6)) * 100)
    found = exflow.solve(weights, Cluster(1, 2), method="ilp", backend=backend, time_limit_s=60).outcome
    assert found.backend == {"ortools": "ortools cp-sat", "pulp": "pulp cbc"}[backend]
    assert (found.status, found.gap, found.bound_kind) == (Status.OPTIMAL, 0, "ilp")


@pytest.mark.parametrize("backend", ["ortools", "pulp"])
def test_at_the_time_limit_the_integer_programme_gives_the_best_found_with_bound_and_gap(
    rng: np.random.Generator, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "ILP_START_WORK", 2e6)
    weights = rng.poisson(rng.dirichlet(np.full(12, 0.5), (5, 12)) * 100)
    found = exflow.solve(weights, Cluster(1, 4), method="ilp", backend=backend, time_limit_s=2).outcome
    assert found.status is Status.TIME_LIMIT
    assert found.wall_s < 60
    assert found.bound is not None
    assert found.gap is not None
    assert found.gap > 0
    assert found.objective.value < found.bound <= 1


def test_with_replicas_the_integer_programme_claims_no_bound_of_its_own(rng: np.random.Generator) -> None:
    weights = rng.poisson(rng.dirichlet(np.full(4, 0.5), (2, 4)) * 100)
    found = exflow.solve(weights, Cluster(1, 3), slots=2, method="ilp", time_limit_s=20)
    assert found.placement.has_replicas
    assert found.outcome.bound_kind != "ilp"


@pytest.mark.parametrize("order", [("ortools", "pulp"), ("pulp", "ortools")])
def test_both_backends_work_in_one_process_in_either_order(order: tuple[str, str]) -> None:
    code = f"""
import numpy as np
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
weights = np.arange(32).reshape(2, 4, 4) % 5
values = [exflow.solve(weights, Cluster(1, 2), method="ilp", backend=b).outcome.objective.value for b in {order}]
assert abs(values[0] - values[1]) < 1e-9, values
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def staged_optimum(weights: Array, slots: list[int], group: int, brute_force: BruteForce) -> float:
    """The most transitions that any placement keeps on nodes."""
    return brute_force(weights, [sum(slots[i : i + group]) for i in range(0, len(slots), group)], np.eye(2))


@pytest.mark.parametrize("backend", ["ortools", "pulp"])
def test_the_papers_stages_keep_the_most_on_nodes_and_then_the_most_on_devices_inside_them(
    brute_force: BruteForce, rng: np.random.Generator, backend: Backend
) -> None:
    for _ in range(3):
        weights = np.round(rng.dirichlet(np.full(6, 0.4), (2, 6)) * 50)
        programme = Programme(list(weights), (6,) * 3, np.array([2, 1, 2, 1]), TWO_NODES, 2)
        found = solve_paper(programme, backend, time_limit_s=60, seed=0)
        assert found.proven
        assert found.bound == np.inf
        nodes = [device_E // 2 for device_E in found.layout]
        assert programme.of_nodes().value(nodes) == pytest.approx(staged_optimum(weights, [2, 1, 2, 1], 2, brute_force))
        for node in (0, 1):
            members = [np.flatnonzero(node_E == node) for node_E in nodes]
            inside = [device_E[member] - 2 * node for device_E, member in zip(found.layout, members, strict=True)]
            stage = programme.inside(node, members)
            assert stage.value(inside) == pytest.approx(brute_force_uneven(stage))


def brute_force_uneven(programme: Programme) -> float:
    """The best value of two devices that hold three experts a layer, every deal tried."""
    deals = [np.array(one) for one in itertools.product((0, 1), repeat=3) if sum(one) == programme.slots[1]]
    return max(programme.value(list(layout)) for layout in itertools.product(deals, repeat=3))


@pytest.mark.parametrize(("cluster", "kind"), [(Cluster(1, 2), "ilp"), (Cluster(2, 1), "ilp"), (Cluster(2, 2), None)])
def test_the_method_paper_is_proven_where_it_has_one_stage_and_never_beats_the_whole_programme(
    rng: np.random.Generator, cluster: Cluster, kind: str | None
) -> None:
    weights = rng.poisson(rng.dirichlet(np.full(4, 0.5), (2, 4)) * 100)
    paper, whole = (exflow.solve(weights, cluster, method=how, time_limit_s=60).outcome for how in ("paper", "ilp"))
    assert paper.backend == "ortools cp-sat"
    assert whole.status is Status.OPTIMAL
    sign = 1 if paper.objective.sense == "max" else -1
    assert sign * paper.objective.value <= sign * whole.objective.value + 1e-9
    if kind:
        assert paper.objective.value == pytest.approx(whole.objective.value)
        assert paper.status is Status.OPTIMAL


def test_the_method_paper_ends_in_time_with_experts_at_least_in_their_own_order(rng: np.random.Generator) -> None:
    weights = rng.poisson(rng.dirichlet(np.full(24, 0.3), (5, 24)) * 100)
    found = exflow.solve(weights, Cluster(2, 3), method="paper", time_limit_s=3)
    assert found.outcome.status is Status.TIME_LIMIT
    assert found.outcome.wall_s < 60
    assert found.placement.slots.tolist() == [4] * 6
