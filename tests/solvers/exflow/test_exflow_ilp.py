import itertools
import os
import signal
import subprocess
import sys
import threading
from concurrent import futures
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator
from ortools.sat.python import cp_model

from moeplan.profilers.cluster import Cluster, Link
from moeplan.solvers import exflow
from moeplan.solvers.exflow import bounded, caps, ilp, strategy
from moeplan.solvers.exflow.ilp import Backend, solve_ilp, solve_paper
from moeplan.solvers.exflow.programme import Programme
from moeplan.solvers.outcome import Status
from tests.builders import known
from tests.solvers.builders import TWO_NODES, brute_force, programme_of

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
def test_both_backends_reach_the_optimum(rng: Generator, backend: Backend, case: str, whole: bool) -> None:
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
def test_the_method_ilp_proves_what_simple_bounds_cannot(rng: Generator, backend: Backend) -> None:
    weights = rng.poisson(rng.dirichlet(np.full(6, 0.5), (2, 6)) * 100)
    found = exflow.solve(weights, Cluster(1, 2), method="ilp", backend=backend, time_limit_s=60).outcome
    assert found.backend == {"ortools": "ortools cp-sat", "pulp": "pulp cbc"}[backend]
    assert (found.status, found.gap, found.bound_kind) == (Status.OPTIMAL, 0, "ilp")


@pytest.mark.parametrize("backend", ["ortools", "pulp"])
def test_at_the_time_limit_the_integer_programme_gives_the_best_found_with_bound_and_gap(
    rng: Generator, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "ILP_START_WORK", 2e6)
    weights = rng.poisson(rng.dirichlet(np.full(12, 0.5), (5, 12)) * 100)
    found = exflow.solve(weights, Cluster(1, 4), method="ilp", backend=backend, time_limit_s=2).outcome
    assert found.status is Status.TIME_LIMIT
    assert found.wall_s < 60
    assert known(found.gap) > 0
    assert found.objective.value < known(found.bound) <= 1


def test_with_replicas_the_integer_programme_claims_no_bound_of_its_own(rng: Generator) -> None:
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
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("backend", ["ortools", "pulp"])
def test_the_papers_stages_keep_the_most_on_nodes_then_on_devices(rng: Generator, backend: Backend) -> None:
    for _ in range(3):
        weights = np.round(rng.dirichlet(np.full(6, 0.4), (2, 6)) * 50)
        programme = Programme(list(weights), (6,) * 3, np.array([2, 1, 2, 1]), TWO_NODES, 2)
        found = solve_paper(programme, backend, time_limit_s=60, seed=0)
        assert found.proven
        assert found.bound == np.inf
        nodes = [device_E // 2 for device_E in found.layout]
        assert programme.of_nodes().value(nodes) == pytest.approx(brute_force(weights, [3, 3], np.eye(2)))
        for node in (0, 1):
            members = [np.flatnonzero(node_E == node) for node_E in nodes]
            inside = [device_E[member] - 2 * node for device_E, member in zip(found.layout, members, strict=True)]
            stage = programme.inside(node, members)
            assert stage.value(inside) == pytest.approx(brute_force_uneven(stage))


def brute_force_uneven(programme: Programme) -> float:
    """The best value of two devices that hold three experts per layer, every deal tried."""
    deals = [np.array(one) for one in itertools.product((0, 1), repeat=3) if sum(one) == programme.slots[1]]
    return max(programme.value(list(layout)) for layout in itertools.product(deals, repeat=3))


@pytest.mark.parametrize(("cluster", "kind"), [(Cluster(1, 2), "ilp"), (Cluster(2, 1), "ilp"), (Cluster(2, 2), None)])
def test_the_method_paper_is_proven_in_one_stage_at_most(rng: Generator, cluster: Cluster, kind: str | None) -> None:
    weights = rng.poisson(rng.dirichlet(np.full(4, 0.5), (2, 4)) * 100)
    paper, whole = (exflow.solve(weights, cluster, method=how, time_limit_s=60).outcome for how in ("paper", "ilp"))
    assert paper.backend == "ortools cp-sat"
    assert whole.status is Status.OPTIMAL
    sign = 1 if paper.objective.sense == "max" else -1
    assert sign * paper.objective.value <= sign * whole.objective.value + 1e-9
    if kind:
        assert paper.objective.value == pytest.approx(whole.objective.value)
        assert paper.status is Status.OPTIMAL


def test_the_method_paper_ends_in_time_with_experts_at_least_in_their_own_order(rng: Generator) -> None:
    weights = rng.poisson(rng.dirichlet(np.full(24, 0.3), (5, 24)) * 100)
    found = exflow.solve(weights, Cluster(2, 3), method="paper", time_limit_s=3)
    assert found.outcome.status is Status.TIME_LIMIT
    assert found.outcome.wall_s < 60
    assert found.placement.slots.tolist() == [4] * 6


@pytest.mark.parametrize("scale", [1e-300, 1e-180, 1e180, 1e300])
def test_weights_of_any_size_give_the_placement_and_the_bound_of_weights_near_one(scale: float) -> None:
    rng = np.random.default_rng(0)
    weights, pairs = rng.random((3, 6, 6)), rng.random((4, 6, 6))
    for slots in (2, [1, 3, 2]):
        near, far = (
            exflow.solve(weights * unit, Cluster(1, 3), coactivation=pairs * unit, slots=slots, work=2e7).outcome
            for unit in (1, scale)
        )
        assert far.objective.value == pytest.approx(near.objective.value, rel=1e-9)
        assert far.bound == pytest.approx(near.bound, rel=1e-6)


@pytest.mark.parametrize("backend", ["ortools", "pulp"])
def test_the_papers_stages_place_on_clusters_with_nodes_that_hold_nothing(backend: Any) -> None:
    found = exflow.solve(
        np.ones((1, 2, 2)), Cluster(2, 2), slots=[0, 0, 1, 1], method="paper", backend=backend, time_limit_s=20
    )
    assert sorted(found.placement.device_of_slot.tolist()) == [2, 3]


@pytest.mark.parametrize("phase", ["_bound", "with_replicas", "anneal_replicas"])
def test_ctrl_c_in_any_phase_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    module = bounded if phase == "_bound" else strategy
    real, calls = getattr(module, phase), []

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(module, phase, interrupted)
    weights = np.random.default_rng(1).random((3, 8, 8))
    found = exflow.solve(weights, Cluster(1, 4), slots=3, work=2e7)
    assert found.outcome.status is Status.INTERRUPTED
    assert known(found.outcome.bound) >= found.outcome.objective.value
    assert found.placement.num_slots == 12


def test_what_time_ends_says_so_wherever_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    weights, loads = rng.random((1, 9, 9)), np.array([[11, 10, 10, 19, 1, 3, 8, 15, 14], [1] * 9])
    ample: dict[str, Any] = {"time_limit_s": 1000, "work": 1e7}

    def statuses() -> list[Status]:
        capped = exflow.solve(weights, Cluster(1, 3), loads=loads, max_load=1.022, **ample)  # by CP-SAT
        return [capped.outcome.status, exflow.solve(weights, Cluster(1, 3), slots=4, **ample).outcome.status]

    assert statuses() == [Status.FEASIBLE] * 2
    real = caps._evenest
    monkeypatch.setattr(caps, "_evenest", lambda *given: (real(*given)[0], False))
    monkeypatch.setattr(strategy, "FILL_SHARE", 0)
    assert statuses() == [Status.TIME_LIMIT] * 2


def test_equal_links_are_one_level_whatever_nodes_there_are() -> None:
    weights = np.random.default_rng(1).random((3, 4, 4))
    near = exflow.solve(weights, Cluster(1, 4)).outcome
    apart = exflow.solve(weights, Cluster(2, 2, dict.fromkeys(("intra", "inter"), Link(1e-6, 1e-10))))
    assert near.status is apart.outcome.status is Status.OPTIMAL
    assert apart.outcome.objective.value == pytest.approx(1 - near.objective.value)
    assert not apart.stages


TERMINATED = """
import os, signal, sys, threading, time
import numpy as np
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
weights = np.random.default_rng(0).dirichlet(np.full(16, 0.3), (11, 16))
threading.Timer(5, os.kill, (os.getpid(), signal.SIGTERM)).start()
exflow.solve(weights, Cluster(1, 4), method="ilp", time_limit_s=600)
"""


def test_sigterm_within_the_integer_programme_ends_it() -> None:
    assert subprocess.run([sys.executable, "-c", TERMINATED], timeout=300).returncode == 143


class CtrlC(cp_model.CpSolverSolutionCallback):
    """Interrupts the process once the solver has found so many solutions."""

    def __init__(self, solutions: int) -> None:
        super().__init__()
        self.left = solutions

    def on_solution_callback(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_within_the_integer_programme_stops_it_and_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, loads, solve = np.random.default_rng(0), np.ones((2, 9)), cp_model.CpSolver.solve
    loads[0] = [11, 10, 10, 19, 1, 3, 8, 15, 14]
    exflow.solve(rng.random((1, 9, 9)), Cluster(1, 3), loads=loads, max_load=1.022, work=1e6)  # CP-SAT before Ctrl-C
    weights = rng.dirichlet(np.full(12, 0.3), (11, 12))
    programme = programme_of(weights, [3] * 4, np.kron(np.eye(2), np.ones((2, 2))) + np.eye(4), 2)
    start = programme.first_layout()
    monkeypatch.setattr(cp_model.CpSolver, "solve", lambda self, model: solve(self, model, CtrlC(3)))
    for found in (
        solve_ilp(programme, start, "ortools", time_limit_s=300, seed=0),
        solve_paper(programme, "ortools", time_limit_s=300, seed=0),
    ):
        assert (found.interrupted, found.proven) == (True, False)
        assert programme.value(found.layout) > programme.value(start)
    monkeypatch.setattr(cp_model.CpSolver, "solve", lambda self, model: solve(self, model, CtrlC(1)))
    solved = exflow.solve(weights, Cluster(2, 2), method="ilp", time_limit_s=300)
    assert solved.outcome.status is Status.INTERRUPTED


def test_ctrl_c_before_the_integer_solver_has_begun_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, waits = threading.Event(), list[float | None]()

    def interrupted(searches: Any, timeout: float | None = None) -> None:
        waits.append(timeout)
        if timeout is None:
            raise KeyboardInterrupt
        begin.set()  # once the first call to stop has gone unheard
        futures.wait(searches, timeout)

    def late(self: Any, model: Any) -> Any:
        begin.wait()
        return solve(self, model)

    solve = cp_model.CpSolver.solve
    monkeypatch.setattr(ilp, "wait", interrupted)
    monkeypatch.setattr(cp_model.CpSolver, "solve", late)
    weights = np.random.default_rng(0).random((11, 12, 12))
    programme = programme_of(weights, [3] * 4)
    found = solve_ilp(programme, programme.first_layout(), "ortools", time_limit_s=300, seed=0)
    assert found.interrupted
    assert len(waits) > 2
