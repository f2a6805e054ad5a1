import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
from moeplan.solvers.exflow import simple, strategy
from moeplan.solvers.outcome import Status


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
    module = simple if phase == "_bound" else strategy
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
    assert found.outcome.bound is not None
    assert found.outcome.bound >= found.outcome.objective.value
    assert found.placement.num_slots == 12


INTERRUPTED = """
import os, signal, threading, time
import numpy as np
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow

rng = np.random.default_rng(0)
loads = np.ones((2, 6))
loads[0] = [6, 5, 4, 3, 2, 1]
exflow.solve(rng.random((1, 6, 6)), Cluster(1, 3), loads=loads, max_load=1.01, work=1e6)  # evened by CP-SAT
threading.Timer(4, os.kill, (os.getpid(), signal.SIGINT)).start()
started = time.perf_counter()
found = exflow.solve(rng.random((11, 12, 12)), Cluster(1, 4), method="ilp", time_limit_s=300)
print(found.outcome.status, time.perf_counter() - started < 60)
"""


def test_ctrl_c_within_the_integer_programme_stops_it_and_keeps_the_best() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=ctrl_c_heard)
    assert done.stdout == "interrupted True\n", done.stderr


def ctrl_c_heard() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
