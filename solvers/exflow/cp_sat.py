"""CP-SAT that leaves Ctrl-C to Python: its own handler would stay away for good, so that the next Ctrl-C kills."""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver

__all__ = ["solved"]


def solved(model: "CpModel", *, time_limit_s: float, seed: int = 0) -> "tuple[CpSolver, bool] | None":
    """A solver that holds the best solution found in so many seconds, repeatably, and whether it is proven.

    None without a solution.

    Raises
    ------
    KeyboardInterrupt
        As soon as the search has stopped.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.num_workers = 1  # repeatable
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        search = pool.submit(solver.solve, model)
        try:
            status = search.result()
        except KeyboardInterrupt:
            solver.stop_search()
            raise
    return (solver, status == cp_model.OPTIMAL) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
