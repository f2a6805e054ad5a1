"""Rounds of annealing: longer and longer, on two threads, all that is found recombined.

To be imported in the call that needs it (compiled).

Legend: L MoE layers; D devices.
"""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .budget import Budget
from .kernel import anneal, descend
from .programme import Layout, Programme
from .recombination import recombine
from .search import Incumbent
from .state import deals_of, moved, state_of
from .terms import Terms

__all__ = ["anneal_rounds", "compile_rounds"]

WORKERS = 2
WIDEST = 4  # experts dealt from each of two devices
HOT, WARM, COLD = 1.4, 0.9, 0.45  # temperatures, in units of `_unit`
FRESH_SHARE, MOST_FRESH = 0.4, 200  # of the work, and block moves a pair of devices, for the first fresh start
REHEAT_SHARE = 1 / 6  # of the length of a fresh start
STALE = 6  # reheats without gain that end a round
PATIENCE = 3  # rounds without gain that end a search
CHUNK = 1e7  # work between looks at the clock
OVERHEAD = 600  # work a layer that a block move takes besides its ways
MOST_RECOMBINED = 128  # devices; beyond, renaming takes longer than it is worth


def anneal_rounds(
    programme: Programme,
    terms: Terms,
    budget: Budget,
    rng: np.random.Generator,
    incumbent: Incumbent,
    *,
    fresh: bool = True,
) -> None:
    """Improve an incumbent, whose layout is legal, until the budget is spent, its bound met, or rounds gain nothing.

    Parameters
    ----------
    budget
        Its work is what each thread may do.
    fresh
        Whether rounds begin with an annealing that forgets the incumbent; without, they reheat it only.
    """
    if np.count_nonzero(programme.slots) < 2 or budget.exhausted or incumbent.optimal:
        return
    rounds, idle = _Rounds(programme, terms, budget, rng, incumbent), 0
    length = min(FRESH_SHARE * budget.left, MOST_FRESH * rounds.pairs * rounds.cost)
    while idle < PATIENCE and not (budget.exhausted or incumbent.optimal):
        before = incumbent.value
        if fresh:
            rounds.run(HOT, length)
        stale = 0
        while stale < STALE and not (budget.exhausted or incumbent.optimal):
            stale = 0 if rounds.run(WARM, length * REHEAT_SHARE) else stale + 1
        idle = idle + 1 if incumbent.value <= before else 0
        length *= 2


def compile_rounds() -> float:
    """Compile what annealing needs, or load it from the cache; the seconds that this took."""
    started = time.perf_counter()
    programme = Programme([np.eye(4)], (4, 4), np.array([2, 2]), np.eye(2), 2)
    anneal_rounds(programme, Terms(), Budget(1, 60), np.random.default_rng(0), Incumbent(programme))
    return time.perf_counter() - started


class _Rounds:
    """What the rounds of a search share: threads' random numbers and room to work in, weights as integers."""

    def __init__(
        self, programme: Programme, terms: Terms, budget: Budget, rng: np.random.Generator, incumbent: Incumbent
    ) -> None:
        self._programme, self._terms, self._budget, self._incumbent = programme, terms, budget, incumbent
        self._state = state_of(programme, terms, incumbent.layout)
        self._deals = [tuple(deals_of(m, programme.num_layers) for m in range(1, WIDEST + 1)) for _ in range(WORKERS)]
        self._seeds = rng.integers(1, 2**63, size=(WORKERS, 1), dtype=np.uint64)
        self._unit = _unit(programme, terms)
        slots = np.minimum(programme.slots[programme.slots > 0], WIDEST)
        self.pairs = len(slots) * (len(slots) - 1) / 2
        self.cost = programme.num_layers * (float(np.mean([math.comb(2 * m, m) ** 2 for m in slots])) + OVERHEAD)

    def run(self, hot: float, work: float) -> bool:
        """Cool the incumbent down from a temperature in every thread; whether it, recombined with these, gains."""
        budget, stop = self._budget, threading.Event()
        work = min(work, budget.left)
        if work <= 0 or budget.late:
            return False
        seconds = budget.remaining_s * work / budget.left
        with ThreadPoolExecutor(WORKERS) as pool:
            try:
                futures = [pool.submit(self._cool, i, hot, work, seconds, stop) for i in range(WORKERS)]
                layouts = [future.result() for future in futures]
            finally:
                stop.set()
        budget.spend(work)
        before = self._incumbent.value
        self._take(layouts)
        return self._incumbent.value > before

    def _cool(self, worker: int, hot: float, work: float, seconds: float, stop: threading.Event) -> Layout:
        """The layout that the incumbent ends in when it is heated and cooled down, by temperature and then by none."""
        state, deals, seed = moved(self._state, self._incumbent.layout), self._deals[worker], self._seeds[worker]
        started, spent, share = time.perf_counter(), 0.0, 0.0
        chunk = max(1, int(CHUNK / self.cost))
        while share < 1 and not stop.is_set():
            then = min(1.0, share + chunk * self.cost / work)
            here, there = (self._unit * hot * (COLD / hot) ** at for at in (share, then))
            anneal(state, deals, chunk, here, there, seed)
            spent += chunk * self.cost
            share = max(spent / work, (time.perf_counter() - started) / seconds)
        for device in range(len(state.first) - 1):  # what no temperature gains, within the work of a round
            if stop.is_set() or self._budget.late:
                break
            descend(state, deals, device, seed)
        return [home[:size] for home, size in zip(state.home, self._programme.sizes, strict=True)]

    def _take(self, layouts: list[Layout]) -> None:
        """Offer the layouts, and the best mixture of them and the incumbent."""
        programme, terms, incumbent = self._programme, self._terms, self._incumbent
        if len(programme.slots) <= MOST_RECOMBINED and not self._budget.late:
            layouts = [*layouts, recombine(programme, terms, [incumbent.layout, *layouts])]
        for layout in layouts:
            incumbent.offer(layout, terms.value(programme, layout))


def _unit(programme: Programme, terms: Terms) -> float:
    """The mean, over experts and neighbouring layers, of their root mean square weight, times what a device is worth.

    The mean over experts, since the few busiest would set the temperature of all.
    """
    weights = [*programme.weights, *(() if terms.beside is None else terms.beside)]
    rows = [np.sqrt((weight**2).mean(axis=axis)) for weight in weights for axis in (0, 1) if weight.size]
    node_worth = programme.near[0, 1] if 1 < programme.devices_per_node < len(programme.slots) else 0.0
    return float(np.mean(np.concatenate(rows)) * (programme.near[0, 0] - node_worth) if rows else 0.0) or 1.0
