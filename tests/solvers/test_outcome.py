import time

import pytest

from moeplan.solvers.outcome import Objective, Outcome, Status


@pytest.mark.parametrize("status", [Status.FEASIBLE, Status.TIME_LIMIT, Status.INTERRUPTED])
def test_a_proven_value_is_optimal_however_the_solve_ended_and_its_own_bound(status: Status) -> None:
    found = Outcome.of(
        status=status,
        objective=Objective("hop_cost", 1e-17, "min"),
        bound=0.0,
        bound_kind="spectral",
        proven=True,
        started=time.perf_counter() - 2,
        backend="moeplan",
    )
    assert (found.status, found.bound, found.gap) == (Status.OPTIMAL, 1e-17, 0)
    assert 2 <= found.wall_s < 60


@pytest.mark.parametrize(("bound", "gap"), [(None, None), (4.0, 0.25)])
def test_an_unproven_value_keeps_its_status_and_its_gap(bound: float | None, gap: float | None) -> None:
    found = Outcome.of(
        status=Status.FEASIBLE,
        objective=Objective("hops_kept", 3.0, "max"),
        bound=bound,
        started=time.perf_counter(),
        backend="moeplan",
    )
    assert (found.status, found.bound, found.gap) == (Status.FEASIBLE, bound, gap)
