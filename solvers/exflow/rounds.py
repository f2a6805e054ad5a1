"""Rounds of annealing on two threads, all layouts that they end in recombined: ever longer rounds, or a long one.

To be imported in the call that needs it (compiled).

Legend: L MoE layers; M layouts; D devices.
"""

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from ...workers import num_threads
from ..arrays import Ints
from ..moves import best_labels
from .budget import PER_STEEP, WIDEST, Budget, Cooling, block_work, naming_work
from .kernel import anneal, descend
from .messages import Deals, deals_of
from .programme import Incumbent, Layout, Programme, Terms
from .state import State, moved, state_of
from .sweeps import name_worth, polish

WORKERS = 2
HOT, WARM = 1.25, 0.85  # temperatures, in units of the weights (`Cooling`)
SHORTEST, PER_PAIR = 20, 4  # block moves a pair of devices of the first fresh start: at least, and a pair; where they
# deal a part of the experts, so many times more as there are pairs of parts
GROWTH = 2  # of fresh starts
MANY = 100  # where fewer than so many fit into the work, one takes a share of it and its round lasts to the end
LEAST_SHARE, FRESH_SHARE = 0.4, 0.6  # that it takes at least, and any at most
QUICK_SHARE = 1 / 16  # of the first fresh start, for one before it that is soon there
LAST_SHARE = 0.3  # of the work, for the best round at the end
REHEAT_SHARE = 0.2  # of the length of a fresh start
REHEAT_GROWTH, LITTLE = 1.3, 1e-4  # after a reheat without a relative gain worth mention
REHEATS_TO = 0.5  # of the work of its fresh start, where a round ends
PATIENCE = 4  # rounds without gain end a search
CHUNK, CHUNKS = 3e7, 16  # work between looks at the clock, at most; chunks that a cooling has at least
POLISHED = 12  # experts per device: of more, block moves deal so few at once that sweeps gain what they leave
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
    rounds = _Rounds(programme, terms, budget, rng, incumbent)
    parts = max(float(programme.slots[programme.slots > 0].mean()) / WIDEST, 1.0)
    length = max(SHORTEST, PER_PAIR * rounds.pairs) * rounds.pairs * parts**2 * rounds.cost
    if fresh:
        few, last = length * MANY > budget.left, LAST_SHARE * budget.left
        rounds.start(min(length, FRESH_SHARE * budget.left) * QUICK_SHARE)
        if few and not (budget.exhausted or incumbent.optimal):
            work = min(max(length, LEAST_SHARE * budget.left), FRESH_SHARE * budget.left)
            rounds.start(work)
            rounds.reheat(min(length, work) * REHEAT_SHARE, math.inf, 0.0)
        elif not few:
            length = _grow(rounds, budget, incumbent, length, last)
    rounds.reheat(length * REHEAT_SHARE, length * REHEATS_TO, 0.0)


def _grow(rounds: "_Rounds", budget: Budget, incumbent: Incumbent, length: float, last: float) -> float:
    """Rounds of growing length until some gain nothing or only `last` is left of the work; the next length."""
    idle = 0
    while idle < PATIENCE and budget.left > last and not (budget.exhausted or incumbent.optimal):
        before = incumbent.value
        work = min(length, FRESH_SHARE * budget.left)
        rounds.start(work)
        rounds.reheat(work * REHEAT_SHARE, work * REHEATS_TO, last)
        idle = idle + 1 if incumbent.value <= before else 0
        length *= GROWTH
    return length


def compile_rounds() -> None:
    """Compile what annealing needs, or load it."""
    programme = Programme([np.eye(4)], (4, 4), np.array([2, 2]), np.eye(2), 2)
    tiny = programme, Terms(), Budget(1, 3600), np.random.default_rng(0), Incumbent(programme)
    tiny_rounds = _Rounds(*tiny)
    tiny_rounds._cool(0, tiny_rounds.hot, 1.0, 1.0, threading.Event())  # in this thread a signal is heard at once
    anneal_rounds(*tiny)


class _Rounds:
    """State common to the rounds of a search: random numbers and buffers per thread, weights as integers."""

    def __init__(
        self, programme: Programme, terms: Terms, budget: Budget, rng: np.random.Generator, incumbent: Incumbent
    ) -> None:
        self._programme, self._terms, self._budget, self._incumbent = programme, terms, budget, incumbent
        self._layout, self._best = incumbent.layout, incumbent.value
        self._state = state_of(programme, terms, incumbent.layout)
        self._deals = [tuple(deals_of(m, programme.num_layers) for m in range(1, WIDEST + 1)) for _ in range(WORKERS)]
        self._seeds = rng.integers(1, 2**63, size=(WORKERS, 1), dtype=np.uint64)
        self.hot, self.warm = Cooling(programme, terms, HOT), Cooling(programme, terms, WARM)
        movable = int(np.count_nonzero(programme.slots))
        self.pairs = movable * (movable - 1) / 2
        self.cost = block_work(programme, terms)
        self._polishes = terms.plain and int(programme.slots.max()) > POLISHED

    def start(self, work: float) -> None:
        """Begin a round with the best of what every thread cools down to from a temperature that forgets."""
        if layouts := self._cooled(self.hot, work):
            self._layout = max(layouts, key=self._value)
            self._best = self._value(self._layout)
            self._incumbent.offer(self._layout, self._best)

    def reheat(self, work: float, most: float, last: float) -> None:
        """Reheat the layout of the round in every thread and recombine it with what they find, longer if in vain.

        It ends at the best of all.

        Parameters
        ----------
        work, most, last
            Of the first reheating and, at most, of any; what to leave of the budget.
        """
        while work < most and self._budget.left > last and not (self._budget.exhausted or self._incumbent.optimal):
            before = self._best
            self._recombine([self._layout, *self._cooled(self.warm, work)])
            if self._best <= before * (1 + LITTLE):
                work *= REHEAT_GROWTH
        self._recombine([self._layout, self._incumbent.layout])

    def _value(self, layout: Layout) -> float:
        return self._terms.value(self._programme, layout)

    def _recombine(self, layouts: list[Layout]) -> None:
        """Go on from the best of the layouts and the best mixture of them."""
        if len(self._programme.slots) <= MOST_RECOMBINED and not self._budget.late:
            pairs = len(layouts) ** 2 * len(self._programme.weights)
            layouts = [*layouts, recombine(self._programme, self._terms, layouts)]
            self._budget.spend(pairs * naming_work(self._programme))
        for layout in layouts:
            if (value := self._value(layout)) > self._best:
                self._layout, self._best = layout, value
        self._incumbent.offer(self._layout, self._best)

    def _cooled(self, cooling: Cooling, work: float) -> list[Layout]:
        """Layouts to which the round's layout cools down, one per thread; none where the budget is spent."""
        budget, stop = self._budget, threading.Event()
        work = min(work, budget.left)
        if work <= 0 or budget.late:
            return []
        seconds = max(budget.remaining_s, 1e-9) * math.sqrt(work / budget.left)
        with ThreadPoolExecutor(min(WORKERS, num_threads())) as pool:
            try:
                futures = [pool.submit(self._cool, i, cooling, work, seconds, stop) for i in range(WORKERS)]
                layouts, spent = zip(*(future.result() for future in futures), strict=True)
            finally:
                stop.set()
        budget.spend(max(spent))
        return list(layouts)

    def _cool(
        self, worker: int, cooling: Cooling, work: float, seconds: float, stop: threading.Event
    ) -> tuple[Layout, float]:
        """Layout reached by heating and cooling the round's layout, then improving it at no temperature; and its work.

        Each chunk takes as much of what is left of the cooling as it is expected to take of the work that is left.
        """
        state, deals, seed = moved(self._state, self._layout), self._deals[worker], self._seeds[worker]
        started, spent, made, cost, share = time.perf_counter(), 0.0, 0, self.cost, 0.0
        while share < 1 and not stop.is_set():
            left, chunk = work - spent, min(CHUNK, work / CHUNKS)
            blocks = math.ceil(min(max(left, chunk / CHUNKS), chunk) / cost)
            then = share + (1 - share) * min(1.0, blocks * cost / max(left, cost))
            steep = anneal(state, deals, blocks, cooling.at(share), cooling.at(then), seed)
            spent, made, share = spent + blocks * self.cost + steep * PER_STEEP, made + blocks, then
            cost, clock = spent / made, (time.perf_counter() - started) / seconds
            if share < 1 and clock > max(share, spent / work):  # the clock cools faster than the work
                self._budget.cap()
                share = clock
        spent += self._descend(state, deals, seed, spent, stop)
        layout = [home[:size] for home, size in zip(state.home, self._programme.sizes, strict=True)]
        if self._polishes and not stop.is_set():
            polishing = Budget(work, self._budget.remaining_s)
            polish(self._programme, layout, polishing)
            spent += polishing.total - polishing.left
        return layout, spent

    def _descend(
        self, state: State, deals: tuple[Deals, ...], seed: NDArray[np.uint64], most: float, stop: threading.Event
    ) -> float:
        """Take what no temperature gains, device by device, until about as much work is done; the work."""
        spent, last = 0.0, len(state.first) - 2
        for device in range(last):
            if spent >= most or stop.is_set() or self._budget.late:
                break
            descend(state, deals, device, seed)
            spent += (last - device) * self.cost
        return spent


def recombine(programme: Programme, terms: Terms, layouts: Sequence[Layout]) -> Layout:
    """The best layout whose every layer is that of some given layout with its devices renamed.

    Notes
    -----
    Renaming makes layer pairs independent: a pair of partitions keeps what the best renaming of the later one keeps,
    so that the best sequence of partitions is a shortest path through L stages of M (Viterbi).
    """
    choices = range(len(layouts))
    best = np.array([terms.inside(programme, layout, 0) for layout in layouts])
    back, labels = [], []
    for cut in range(len(programme.weights)):
        joined = [[_joined(programme, here[cut], there[cut + 1], cut) for there in layouts] for here in layouts]
        total_MM = best[:, None] + [[worth for worth, _ in row] for row in joined]
        back.append(total_MM.argmax(axis=0))
        labels.append([joined[back[-1][there]][there][1] for there in choices])
        best = total_MM.max(axis=0) + [terms.inside(programme, layout, cut + 1) for layout in layouts]
    path = [int(best.argmax())]
    for from_M in reversed(back):
        path.append(int(from_M[path[-1]]))
    path.reverse()
    name_D = np.arange(len(programme.slots))
    found = [layouts[path[0]][0]]
    for cut, chosen in enumerate(path[1:]):
        name_D = name_D[labels[cut][chosen]]
        found.append(name_D[layouts[chosen][cut + 1]])
    return found


def _joined(programme: Programme, here_E: Ints, there_E: Ints, cut: int) -> tuple[float, Ints]:
    """Weight kept by a layer pair when the later layer's devices are renamed at their best, and the names `[D]`."""
    worth_DD = name_worth(programme, here_E, there_E, cut)
    label_D = best_labels(worth_DD, programme.slots, programme.devices_per_node)
    return float(worth_DD[np.arange(len(label_D)), label_D].sum()), label_D
