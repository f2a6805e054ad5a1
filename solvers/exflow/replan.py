"""Re-planning: the placement that is worth most when every expert that moves has its price.

Legend: L MoE layers; E experts per layer; D devices.
"""

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ..assignment import assign_places
from ..moves import keep_in_place
from ..outcome import ROUNDING, Outcome, PlacementResult, Status, relative_gap
from ..placement import Placement
from .budget import PER_STEEP, WIDEST, Budget, Cooling, block_work, layer_work
from .caps import cap_of, evened
from .methods import compile_annealing
from .problem import Problem
from .programme import Layout, Programme, Terms
from .sweeps import gains

ALIKE = 0.01  # of the value: what moving all experts must give at least; searches end within that of one another
LITTLE = 1e-3  # of the value: a smaller gain is not worth any move
WARM = 0.65  # temperature, in units of the weights (`Cooling`)
PER_PAIR, SHORTEST = 10, 100  # block moves of a reheating: a pair of devices, and at least
STALE = 6  # reheatings without gain end a search
CHUNK = 50  # block moves between looks at the clock
WORK_RATE = 4e8  # a second of the time limit, half of what a core does or less, so that idle machines end by work
MOST_PULL = 2**30 - 1  # beside a pull of as much it fits into an int32


def reconsider(
    transitions: ArrayLike,
    cluster: Cluster,
    found: PlacementResult,
    old: Placement,
    *,
    coactivation: ArrayLike | None = None,
    loads: ArrayLike | None = None,
    max_load: float | None = None,
    price: float = 0.0,
    time_limit_s: float = 30.0,
    work: float | None = None,
    seed: int = 0,
) -> PlacementResult:
    """The placement to go to from `old`: one near it that is worth what the one found is, or nearer.

    Parameters
    ----------
    transitions, coactivation, loads, max_load
        Inputs that `found` was found for (`exflow.solve`).
    price
        Cost of a move, in transitions (or pairs) that stay on one device. At least a hundredth of the value over all
        experts, so that of placements that are worth about the same the one that moves fewest is taken.
    time_limit_s
        A cap on seconds; searches of the size of 24 layers x 32 experts end by themselves in one or two.
    work
        A cap on work, by default what a core does in half of the time limit, so that on an idle machine work ends what
        does not end by itself, and the result is the same again. Where time does, the status is `TIME_LIMIT`.

    Raises
    ------
    ValueError
        A price below 0 or NaN.
    UsageError
        A price where experts have replicas, or other slots than in `old`; without a price devices are renamed there,
        which loses nothing.

    Notes
    -----
    With moved(x) the experts that are elsewhere than in `old`,

        max value(x) - price moved(x)                                                                           (1)

    by annealing from `old` (swapped into the cap) and from `found`, its devices renamed, of which the better is taken.
    A move is a swap, and the price one more pull of its old home on every expert. `old` itself stays where less than
    LITTLE is gained.
    """
    if not price >= 0:
        raise ValueError(f"price {price}; expected 0 or more")
    compiling_s, started = compile_annealing(), time.perf_counter()
    renamed = keep_in_place(found.placement, old, cluster.devices_per_node)
    if renamed.has_replicas or renamed.slots.tolist() != old.slots.tolist():
        if price:
            raise UsageError(
                f"moves to be weighed in {old.num_slots} slots now and {renamed.num_slots} then, for {old.num_experts}"
                " experts; expected one slot an expert as before: leave --horizon away, devices are still named so that"
                " few experts move"
            )
        return dataclasses.replace(found, placement=renamed)
    problem = Problem.of(transitions, cluster, coactivation, loads, None, old.slots, time_limit_s)
    terms = problem.terms
    if max_load is not None:
        terms = dataclasses.replace(terms, load=problem.loads, cap=cap_of(problem.loads, old.slots, max_load))
    least = ALIKE * problem.value(renamed) / (old.num_layers * old.num_experts)
    most = 2 * problem.goal.total * problem.goal.rho  # no move gains as much
    price = min(max(price / problem.unit, least), most)
    cooling = Cooling(problem.programme, terms, WARM)
    weighed = _Weighed(problem.programme, terms, _layout(old), price, cooling)
    budget = Budget(WORK_RATE * time_limit_s if work is None else work, time_limit_s)
    layout, status = _searched(weighed, _layout(renamed), budget, np.random.default_rng(seed), found.outcome.status)
    sets = [[np.flatnonzero(home_E == d).tolist() for d in range(old.num_devices)] for home_E in layout]
    placement = Placement.from_sets(sets, old.num_experts)
    outcome = dataclasses.replace(found.outcome, status=status, compiled_s=found.outcome.compiled_s + compiling_s)
    outcome = _outcome(problem, placement, outcome, budget, started)
    return dataclasses.replace(found, placement=placement, outcome=outcome)


@dataclass(frozen=True, slots=True)
class _Weighed:
    """Programme (1): what counts, where experts are before, what a move costs, and how reheatings cool down."""

    programme: Programme
    terms: Terms
    before: Layout
    price: float
    cooling: Cooling

    @property
    def legal(self) -> list[Layout]:
        """Experts where they are before, after the few swaps that keep a cap; none where swaps do not get there."""
        terms, num_devices = self.terms, len(self.programme.slots)
        if terms.cap is None or terms.load is None:
            return [self.before]
        layers = list(zip(terms.load, self.before, terms.cap.tolist(), strict=True))
        layout = [evened(load_E, home_E, num_devices, cap=cap) for load_E, home_E, cap in layers]
        kept = [np.bincount(now_E, load_E).max() <= cap for now_E, (load_E, _, cap) in zip(layout, layers, strict=True)]
        return [layout] if all(kept) else []

    def net(self, layout: Layout) -> float:
        """Value of a layout less the price of its moves."""
        moved = sum(np.count_nonzero(now_E != was_E) for now_E, was_E in zip(layout, self.before, strict=True))
        return self.terms.value(self.programme, layout) - self.price * moved  # (1)

    def improved(self, layout: Layout, budget: Budget, seed: NDArray[np.uint64]) -> Layout:
        """The best of a layout's reheatings, each from the best so far."""
        best, stale = self.settled(layout, budget), 0
        while stale < STALE and not budget.late and (blocks := self.affordable(budget)):
            tried = self.settled(self.reheated(best, blocks, budget, seed), budget)
            stale = 0 if self.net(tried) > self.net(best) else stale + 1
            best = max(best, tried, key=self.net)
        return best

    def settled(self, layout: Layout, budget: Budget) -> Layout:
        """Sweeps up and down until no layer gains; nothing where more counts than a programme does.

        One layer given its neighbours is a transportation problem, with the price on staying.
        """
        layout, upward, gained = list(layout), True, self.terms.plain
        while gained and not budget.exhausted:
            gained = False
            for layer in range(len(layout)) if upward else reversed(range(len(layout))):
                worth_ED = self.programme.worth(layout, layer)
                worth_ED[np.arange(len(worth_ED)), self.before[layer]] += self.price
                home_E = assign_places(-worth_ED, self.programme.places)
                budget.spend(layer_work(len(home_E), len(self.programme.places)))
                if gains(worth_ED, home_E, layout[layer]):
                    layout[layer], gained = home_E, True
            upward = not upward
        return layout

    def affordable(self, budget: Budget) -> int:
        """Block moves of a reheating that leave work for the descent after it; 0 where they would be too few."""
        if np.count_nonzero(self.programme.slots) < 2:
            return 0
        num_devices = len(self.programme.slots)
        left = int(budget.left / block_work(self.programme, self.terms)) - num_devices * (num_devices - 1) // 2
        return min(max(PER_PAIR * num_devices**2 // 2, SHORTEST), left) if left >= SHORTEST else 0

    def reheated(self, layout: Layout, blocks: int, budget: Budget, seed: NDArray[np.uint64]) -> Layout:
        """Layout reached by cooling down in `blocks` block moves, old homes pulling at their experts."""
        from .kernel import anneal, descend
        from .messages import deals_of
        from .state import state_of

        state, num_devices = state_of(self.programme, self.terms, layout), len(self.programme.slots)
        for pull_DP, home_E in zip(state.pull, self.before, strict=True):
            pull_DP[home_E, np.arange(len(home_E))] += min(round(self.price / state.worth[0]), MOST_PULL)
        state, steep = state._replace(tied=True), 0
        deals = tuple(deals_of(m, len(layout)) for m in range(1, WIDEST + 1))
        for moves, here, there in _chunks(self.cooling, blocks):
            if not budget.late:
                steep += anneal(state, deals, moves, here, there, seed)
        for device in range(num_devices):
            if not budget.late:
                descend(state, deals, device, seed)
        blocks += num_devices * (num_devices - 1) // 2
        budget.spend(blocks * block_work(self.programme, self.terms) + steep * PER_STEEP)
        return [home_P[:size] for home_P, size in zip(state.home, self.programme.sizes, strict=True)]


def _searched(
    weighed: _Weighed, found: Layout, budget: Budget, rng: np.random.Generator, status: Status
) -> tuple[Layout, Status]:
    """The best layout, and how the search ended; what was found after an interruption."""
    starts = [*weighed.legal, found]
    best = max(starts, key=weighed.net)
    if status is Status.INTERRUPTED:
        return best, status
    try:
        for number, start in enumerate(starts):
            seed, part = rng.integers(1, 2**63, size=1, dtype=np.uint64), budget.part(1 / (len(starts) - number))
            best = max(best, weighed.improved(start, part, seed), key=weighed.net)
            budget.settle(part)
    except KeyboardInterrupt:
        status = Status.INTERRUPTED
    least = weighed.net(starts[0])
    return (starts[0] if weighed.net(best) <= least + LITTLE * abs(least) else best), status


def _chunks(cooling: Cooling, blocks: int) -> Iterable[tuple[int, float, float]]:
    """The chunks that so many block moves are made in, and the temperatures at which each begins and ends."""
    ends = [*range(0, blocks, CHUNK), blocks]
    temperature = [cooling.at(end / blocks) for end in ends]
    return zip(np.diff(ends).tolist(), temperature[:-1], temperature[1:], strict=True)


def _outcome(problem: Problem, placement: Placement, found: Outcome, budget: Budget, started: float) -> Outcome:
    """The outcome of what was found, at the value of another placement, which time may have ended the search for."""
    objective = problem.goal.objective(problem.value(placement))
    gap = relative_gap(objective.value, found.bound)
    proven = found.status is Status.OPTIMAL and gap is not None and gap <= ROUNDING
    status = found.status
    if not proven and status in (Status.OPTIMAL, Status.FEASIBLE):
        status = Status.TIME_LIMIT if budget.capped else Status.FEASIBLE
    wall_s = found.wall_s + time.perf_counter() - started
    return dataclasses.replace(found, status=status, objective=objective, gap=gap, wall_s=wall_s)


def _layout(placement: Placement) -> Layout:
    return [placement.holds(layer).argmax(axis=1) for layer in range(placement.num_layers)]
