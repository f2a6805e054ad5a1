"""EPLB: replicas for the busiest experts, packed evenly (solvers/eplb)."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ....runtime.decisions import DispatchModel
from ....runtime.plan import Part, Plan
from ....solvers import eplb
from ....solvers.balance import balance
from ....solvers.outcome import PlacementResult
from ....traces.counts import Counts
from ...document import Section
from ...evaluate.metrics import BALANCE
from ...evaluate.scene import Scene
from ...options import Member, RawBalance
from ...task import Task
from ..placement import PlacementStrategy, published
from ..strategy import Again, Check, Solution, Told
from . import sections
from .redundancy import slots_of, weighed
from .solve import params_of, phase_swaps, place

__all__ = ["STRATEGY"]


class Eplb(PlacementStrategy):
    """Busy experts are replicated, and devices loaded evenly in every step."""

    name = "eplb"
    by_loads = True

    def judged_on(self, scene: Scene, dispatch_model: DispatchModel) -> str:
        """Balance, which is what it makes."""
        return BALANCE

    def recheck(self, plan: Plan, again: Again | None) -> Iterator[Check | Told]:
        """Balance, wishes, and the arithmetic of what was weighed."""
        from .recheck import recheck

        return recheck(plan, again)

    def remarks(self, plan: Plan, part: Part) -> Iterator[str]:
        """Replicas chosen, EPLB as published, and phases."""
        yield from sections.remarks(plan, part)

    def sections(self, plan: Plan, width: int) -> Iterator[Section]:
        """Replicas weighed, and EPLB as published."""
        yield from sections.sections(plan)

    def place(self, counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
        """Place as asked for."""
        return place(counts, task, slots)

    def solve(self, task: Task) -> Solution:
        """Place the fitted units' experts, with as many replicas as asked for or as serve."""
        counts = task.counts
        redundancy = weighed(counts, task) if params_of(task).redundant == "auto" else None
        slots_D = task.slots if redundancy is None else slots_of(redundancy.chosen.slots, task)
        task.say(f"solving {self.name}")
        placed = place(counts, task, slots_D)
        return self.solution(
            placed,
            task,
            raw=_raw(placed, counts, task, slots_D),
            redundancy=redundancy,
            swaps=phase_swaps(task, slots_D),
            mixture=_mixture(task),
        )


def _mixture(task: Task) -> tuple[Member, ...]:
    """The traces that were planned for together; nothing where there is one."""
    if not task.request.mixture:
        return ()
    return tuple(
        Member(path=str(one.source.path), sha256=one.source.sha256, weight=weight) for weight, one in task.members
    )


def _raw(found: PlacementResult, counts: Counts, task: Task, slots: NDArray[np.int64]) -> RawBalance:
    """Balance of the published algorithm unrepaired, repaired, and of the plan, on the summed fitted loads."""
    groups = task.model.num_expert_groups
    raw = eplb.raw_balance(counts.loads, task.request.cluster, slots=slots, num_groups=groups)
    loads = counts.loads.astype(np.float64)
    repaired, plan = (balance(loads, one.placement) for one in (published(counts, task, slots), found))
    return RawBalance(balance=raw.balance, duplicates=raw.duplicates, repaired=repaired, plan=plan)


STRATEGY = Eplb()
