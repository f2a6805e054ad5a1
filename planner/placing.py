"""What all placement strategies share: count the fitted units, place, replay beside the baselines."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..runtime.decisions import PlacementDecision
from ..solvers.placement import Placement
from ..solvers.result import PlacementResult
from ..traces.count_form import CountTrace
from ..traces.counts import Counts, count
from . import contiguous, exflow
from .balance import eplb
from .balance.balanced import Balanced
from .balance.mixture import Mixture
from .balance.phase_swaps import phase_swaps
from .balance.redundancy import slots_of, weighed
from .measures.tally import Route
from .options import PlacementOptions
from .replanned import previous_routes, reconsidered, replanned, without_previous
from .searched import Searched
from .solved import Solved
from .task import Task

__all__ = ["Place", "counted", "placing"]


class Place(Protocol):
    """From the counts of the fitted units to a placement."""

    def __call__(self, counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
        """Place the experts of every layer in `slots` (`[D]`) slots of each device."""
        ...


def placing(place: Place, *, by_loads: bool = False) -> Callable[[Task], Solved]:
    """The strategy that places by `place`; `by_loads`: for which counts alone are enough."""

    def solve(task: Task) -> Solved:
        request = task.request
        mixture = Mixture(task)
        counts = _count(mixture, by_loads=by_loads)
        redundancy = weighed(place, counts, mixture) if request.redundant == "auto" else None
        slots_D = task.slots if redundancy is None else slots_of(redundancy.chosen.slots, request)
        task.say(f"solving {request.strategy}")
        found = place(counts, task, slots_D)
        placed = reconsidered(found, counts, task)
        task.say("replaying the trace under the plan and its baselines")
        evaluated = mixture.evaluate(_routes(placed.placement, task, counts, slots_D))
        balanced = found if isinstance(found, Balanced) else None
        return Solved(
            decision=PlacementDecision.of(placed.placement, repaired=placed.repaired),
            options=PlacementOptions(
                strategy=request.strategy,
                dispatch_model=task.dispatch_model,
                method=task.method,
                backend=request.backend,
                time_limit_s=request.time_limit_s,
                search=found.search if isinstance(found, Searched) else None,
                replanned=replanned(placed.placement, evaluated, task),
                groups=request.groups,
                dead=request.dead,
                pins=request.pins,
                quantile=request.quantile,
                raw=None if balanced is None else balanced.raw,
                redundancy=redundancy,
                swaps=() if balanced is None else phase_swaps(task, slots_D),
                mixture=mixture.members,
            ),
            outcome=placed.outcome,
            evaluated=without_previous(evaluated),
            sidecars=found.sidecars if isinstance(found, Searched) else {},
            against="contiguous/standard",
        )

    return solve


def counted(task: Task, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Counts:
    """The counts of chosen units, of what the task keeps together."""
    unit_ids = task.surveyed.unit_ids[chosen]
    pairs, coactivation = exflow.counted_pairs(task)
    return count(
        task.trace,
        keep=lambda units: np.isin(units, unit_ids),
        pairs=pairs,
        coactivation=coactivation,
        phases=task.request.phases or None,
    )


def _count(mixture: Mixture, *, by_loads: bool) -> Counts:
    """The counts of the fitted units; of several traces or one in count form the loads alone."""
    task = mixture.task
    if by_loads and (task.request.mixture or isinstance(task.source, CountTrace)):
        counts = mixture.counts()
    else:
        counts = counted(task, task.fitted)
    if not counts.loads.any():
        raise InputError(f"{task.source.path}: no token of the fitted samples is routed; there is nothing to place by")
    return counts


def _routes(placement: Placement, task: Task, counts: Counts, slots_D: NDArray[np.int64]) -> list[Route]:
    """The plan, then the baselines with the same slots."""
    in_order = contiguous.place(counts, task, slots_D).placement
    routes = [Route("plan", task.dispatch_model, placement), Route("contiguous", "standard", in_order)]
    if task.dispatch_model == "coherent":  # tell coherence and placement apart
        routes += [Route("contiguous", "coherent", in_order), Route("plan", "standard", placement)]
    routes.append(Route("eplb", "standard", eplb.place(counts, task, slots_D).placement))
    return [*routes, *previous_routes(task)]
