"""The methods of a solve: annealing, sweeps, the integer programme, and stages, nodes before the devices inside each.

Legend: N nodes of G devices.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..bounds import KeptBound
from ..compiled import seconds_to_compile
from ..outcome import Status
from .budget import Budget
from .ilp import Backend, IlpResult, solve_ilp, solve_paper
from .programme import Incumbent, Layout, Programme, Terms
from .sweeps import START_SHARE, chain, polish, search, start

STAGED_SHARE = 0.7  # of the budget, where there are several nodes
NODE_SHARE = 0.7  # of that; the rest goes to the devices inside the nodes
SWEEPS_WORK = 3e9  # 3 s
SWEEPS_SHARE, SWEEPS_TIME_SHARE = 0.2, 0.4  # of annealing's work and time, at most, for sweeps before it
Method = Literal["annealing", "sweeps", "ilp", "paper"]
Search = Callable[[Programme, Terms, Budget, np.random.Generator, Incumbent], None]


def separable(programme: Programme, terms: Terms) -> bool:
    """Check for the optimal chain of assignments: one expert a device, one level of links, nothing else to count."""
    return terms.plain and not programme.node_worth and int(programme.slots.max()) == 1


@dataclass(frozen=True, slots=True)
class Stage:
    """Cost of a layout after a stage of the search."""

    name: str  #: "nodes", "devices" or "joint"
    #: inter_hops, intra_hops: the shares of transitions (and of a layer's pairs) that leave their node, and their
    #: device but not their node
    inter_hops: float
    intra_hops: float

    @classmethod
    def of(cls, name: str, programme: Programme, terms: Terms, layout: Layout) -> "Stage":
        """The stage that a layout is the end of."""
        met = list(zip(programme.weights, layout[:-1], layout[1:], strict=True))
        if terms.beside is not None:
            met += zip(terms.beside / 2, layout, layout, strict=True)
        total = sum(float(weight.sum()) for weight, *_ in met) or 1.0
        apart = [
            sum(float(weight[here[:, None] // size != there // size].sum()) for weight, here, there in met) / total
            for size in (programme.devices_per_node, 1)
        ]
        return cls(name, apart[0], apart[1] - apart[0])


@dataclass(slots=True)
class Run:
    """One solve under way: the best so far, its bound, and the stages it went through."""

    programme: Programme
    terms: Terms
    incumbent: Incumbent
    bound: KeptBound
    budget: Budget
    seed: int
    stages: tuple[Stage, ...] = field(default=())

    def solve(self, method: Method, backend: Backend) -> Status:
        """Improve the incumbent; how that ended."""
        rng = np.random.default_rng(self.seed)
        try:
            if method == "paper":
                found = solve_paper(self.programme, backend, time_limit_s=self.budget.remaining_s, seed=self.seed)
                self._take(found)
                return Status.FEASIBLE if found.proven else Status.TIME_LIMIT
            if separable(self.programme, self.terms):
                self._solve_chain(rng)
            else:
                if method == "annealing":
                    self._sweep_first()
                self._improve(method, rng)
            if method == "ilp" and not self.incumbent.optimal:
                layout, left_s = self.incumbent.layout, self.budget.remaining_s
                self._take(solve_ilp(self.programme, layout, backend, time_limit_s=left_s, seed=self.seed))
        except KeyboardInterrupt:
            return Status.INTERRUPTED
        return Status.TIME_LIMIT if self.budget.capped else Status.FEASIBLE

    def _solve_chain(self, rng: np.random.Generator) -> None:
        """The chain, and that nothing is better where there are no replicas."""
        layout = chain(self.programme, 0, self.budget, rng)
        value = self.programme.value(layout)
        self.incumbent.offer(layout, value)
        if not self.budget.late and value < self.bound.value and not self.programme.has_spare_slots:
            self.bound = KeptBound(value, frozenset({"assignment"}))
            self.incumbent.target = value

    def _sweep_first(self) -> None:
        """Run all sweeps of this seed first, where that is little of the budget.

        Without replicas homes are never worth less then.
        """
        whole = self.budget
        if self.terms.plain and SWEEPS_SHARE * whole.left >= SWEEPS_WORK:
            self.budget = part = Budget(SWEEPS_WORK, SWEEPS_TIME_SHARE * whole.remaining_s)
            try:
                self._improve("sweeps", np.random.default_rng(self.seed))
            finally:
                self.budget = whole
            whole.settle(part)
            if not self.incumbent.optimal:
                self.stages = ()

    def _improve(self, method: Method, rng: np.random.Generator) -> None:
        """Search at one level of links; where there are two, from the staged solution."""
        programme, terms, budget, incumbent = self.programme, self.terms, self.budget, self.incumbent
        begin, go_on = (improve, anneal) if method == "annealing" else (search, search)
        if not programme.node_worth or terms.cap is not None or incumbent.optimal:
            begin(programme, terms, budget, rng, incumbent)
            return
        if terms.plain:
            layout = chain(programme, 0, budget, rng)
            incumbent.offer(layout, programme.value(layout))
        part = budget.part(STAGED_SHARE)
        layout, stages = staged(programme, terms, part, rng, begin)
        budget.settle(part)
        if terms.plain:
            polish(programme, layout, budget)
        incumbent.offer(layout, terms.value(programme, layout))
        go_on(programme, terms, budget, rng, incumbent)
        self.stages = (*stages, Stage.of("joint", programme, terms, incumbent.layout))

    def _take(self, found: IlpResult) -> None:
        """Offer what an integer programme found; its bound where that is better.

        Raises
        ------
        KeyboardInterrupt
            It was interrupted.
        """
        self.incumbent.offer(found.layout, self.programme.value(found.layout))
        if not found.proven:
            self.budget.cap()
        if not self.programme.has_spare_slots and found.bound < self.bound.value:
            self.bound = KeptBound(found.bound, frozenset({"ilp"}))
        if found.interrupted:
            raise KeyboardInterrupt


def staged(
    programme: Programme, terms: Terms, budget: Budget, rng: np.random.Generator, search: Search
) -> tuple[Layout, tuple[Stage, ...]]:
    """The layout that keeps most on nodes, and given that most on devices (the paper's two stages), and the stages."""
    num_nodes = len(programme.slots) // programme.devices_per_node
    nodes = _solved(programme.of_nodes(), terms, budget, NODE_SHARE, rng, search)
    members = programme.members(nodes)
    subs = [programme.inside(node, member) for node, member in enumerate(members)]
    in_order = programme.joined(members, [sub.first_layout() for sub in subs])
    after_nodes = Stage.of("nodes", programme, terms, in_order)
    inside = [
        _solved(sub, terms.of_node(member), budget, 1 / (num_nodes - node), rng, search)
        for node, (sub, member) in enumerate(zip(subs, members, strict=True))
    ]
    layout = programme.joined(members, inside)
    return layout, (after_nodes, Stage.of("devices", programme, terms, layout))


def _solved(
    programme: Programme, terms: Terms, budget: Budget, share: float, rng: np.random.Generator, search: Search
) -> Layout:
    """The best layout found for one level of links."""
    incumbent, part = Incumbent(programme, terms=terms), budget.part(share)
    search(programme, terms, part, rng, incumbent)
    budget.settle(part)
    return incumbent.layout


def improve(programme: Programme, terms: Terms, budget: Budget, rng: np.random.Generator, incumbent: Incumbent) -> None:
    """Improve `incumbent` by annealing, from a polished chain where nothing but the programme counts."""
    if incumbent.optimal or budget.late:
        return
    if terms.plain and programme.weights:
        part = Budget(START_SHARE * budget.left, math.sqrt(START_SHARE) * budget.remaining_s)
        start(programme, part, rng, incumbent, starts=1)
        budget.settle(part)
    anneal(programme, terms, budget, rng, incumbent)


def anneal(programme: Programme, terms: Terms, budget: Budget, rng: np.random.Generator, incumbent: Incumbent) -> None:
    """Improve `incumbent`, whose layout is worth to begin with, by annealing."""
    from .rounds import anneal_rounds

    anneal_rounds(programme, terms, budget, rng, incumbent)


def compile_annealing() -> float:
    """Seconds to compile what anneals, or to load it."""

    def tiny() -> None:
        from .rounds import compile_rounds

        compile_rounds()

    return seconds_to_compile(tiny)
