"""CP-SAT that leaves signals to Python: its own handler would stay away for good, so that the next Ctrl-C kills."""

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver

__all__ = ["Solved", "solved"]

STOP_S = 0.1  # between two calls to stop: one before the search has begun goes unheard


@dataclass(frozen=True, slots=True)
class Solved:
    """The solver that holds the best solution (None: there is none), whether it is proven, and whether Ctrl-C came."""

    solver: "CpSolver | None"
    proven: bool
    interrupted: bool


def solved(model: "CpModel", *, time_limit_s: float, seed: int = 0) -> Solved:
    """The best solution found in so many seconds, repeatably, or until Ctrl-C."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.num_workers = 1  # repeatable
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        search, interrupted = pool.submit(solver.solve, model), False
        try:
            wait([search])
        except KeyboardInterrupt:
            interrupted = True
        finally:
            while not search.done():
                solver.stop_search()
                wait([search], STOP_S)
    found = search.result() in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Solved(solver if found else None, search.result() == cp_model.OPTIMAL, interrupted)
