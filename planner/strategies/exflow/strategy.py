"""ExFlow: experts that follow each other, or serve the same tokens, live together (solvers/exflow)."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ....errors import UsageError
from ....runtime.decisions import PlacementDecision
from ....runtime.plan import Part, Plan
from ....solvers.outcome import PlacementResult
from ....traces.counts import Counts, Pairs
from ...document import Section
from ...evaluate.evaluate import Evaluated
from ...options import PlacementOptions, Search, StageHops
from ...task import Task
from ..placement import PlacementStrategy
from ..strategy import Again, Check, Solution, Told
from . import sections
from .proof import Proof
from .replan import previous_contender, reconsidered, replanned, vectors_a_move
from .solve import objective, params_of, place, searched

__all__ = ["STRATEGY"]


class Exflow(PlacementStrategy):
    """Experts that follow each other live together."""

    name = "exflow"
    dispatch_models = ("coherent", "standard")

    def check(self, task: Task) -> None:
        """Refuse a horizon without a plan in force, or where nothing says what experts weigh; before the search."""
        params = params_of(task)
        if task.previous is not None and params.groups == "whole":
            raise UsageError("--from with --groups whole; moves of single experts split groups: leave one of them out")
        if params.horizon_tokens is not None and task.previous is None:
            raise UsageError(f"--horizon {params.horizon_tokens}; expected 1 token or more, below 1e18, beside --from")
        if params.horizon_tokens is not None:
            vectors_a_move(task.model)

    def counted_pairs(self, task: Task) -> tuple[Pairs, bool]:
        """Pairs that a task's objective counts: which ones, and whether pairs inside layers too."""
        copies = objective(task) == "copies"
        return "first" if copies and task.dispatch_model == "coherent" else "top1", copies

    def recheck(self, plan: Plan, again: Again | None) -> Iterator[Check | Told]:
        """Recheck what the placement keeps together, the cap, the stages and the bound."""
        from .recheck import recheck

        return recheck(plan, again)

    def to_apply(self, plan: Plan) -> bool:
        """Whether no plan in force is better kept."""
        return not sections.stays_in_force(plan)

    def remarks(self, plan: Plan, part: Part) -> Iterator[str]:
        """Whether to replace the plan in force, what saves how much, and what would save more."""
        yield from sections.remarks(plan, part)

    def sections(self, plan: Plan, width: int) -> Iterator[Section]:
        """The search."""
        yield from sections.search_section(plan)

    def place(self, counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
        """Place by the task's objective, within its cap."""
        return place(counts, task, slots)

    def solve(self, task: Task) -> Solution:
        """Place the fitted units' experts, near the plan in force where there is one."""
        counts = task.counts
        task.say(f"solving {self.name}")
        result, cap = searched(counts, task, task.slots)
        proof = Proof(result.thorough.proofs) if result.thorough.proofs else None
        search = Search(
            objective=objective(task),
            bound=params_of(task).bound,
            proof=None if proof is None else proof.file,
            simple=result.thorough.reasons,
            stages=tuple(StageHops(**dataclasses.asdict(stage)) for stage in result.stages),
            cap=cap,
        )
        timed = dataclasses.replace(result.outcome, compiled_s=result.compiled_s)
        placed = reconsidered(PlacementResult(result.placement, timed, result.repaired), counts, task)
        return dataclasses.replace(
            self.solution(placed, task, search=search),
            aside=previous_contender(task),
            sidecars={} if proof is None else {proof.file.file: proof.to_bytes()},
        )

    def finished(self, task: Task, solution: Solution, evaluated: Evaluated) -> Solution:
        """The solution with what replacing the plan in force takes and gives."""
        assert isinstance(solution.options, PlacementOptions)
        assert isinstance(solution.decision, PlacementDecision)
        told = replanned(solution.decision, evaluated, task)
        return dataclasses.replace(solution, options=solution.options.model_copy(update={"replanned": told}))


STRATEGY = Exflow()
