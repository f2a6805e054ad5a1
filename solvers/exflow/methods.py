"""The methods of a solve: annealing, sweeps, the integer programme, the paper's stages."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..bounds import KeptBound
from ..outcome import Status
from .budget import Budget
from .hierarchy import Stage, staged
from .ilp import Backend, IlpResult, solve_ilp, solve_paper
from .programme import Incumbent, Programme, Terms
from .search import anneal, improve, search
from .sweeps import chain, polish

__all__ = ["SWEEPS_WORK", "Method", "Run", "separable"]

STAGED_SHARE = 0.7  # of the budget, where there are several nodes
SWEEPS_WORK = 3e9  # 3 s
SWEEPS_SHARE, SWEEPS_TIME_SHARE = 0.2, 0.4  # of annealing's work and time, at most, for sweeps before it
Method = Literal["annealing", "sweeps", "ilp", "paper"]


def separable(programme: Programme, terms: Terms) -> bool:
    """Whether the chain of assignments is optimal: one expert a device, one level of links, nothing else to count."""
    return terms.plain and not programme.node_worth and int(programme.slots.max()) == 1


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
        """All that sweeps find with this seed, where that is little of the budget.

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
        begin, go_on = (improve, anneal) if method == "annealing" else (_sweep, _sweep)
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


def _sweep(programme: Programme, terms: Terms, budget: Budget, rng: np.random.Generator, incumbent: Incumbent) -> None:
    assert terms.plain
    search(programme, budget, rng, incumbent)
