"""ExFlow: experts that follow each other, or serve the same tokens, live together (solvers/exflow)."""

import dataclasses

from ....errors import UsageError
from ....runtime.decisions import PlacementDecision
from ....runtime.plan import Plan
from ....solvers.outcome import PlacementResult
from ....traces.counts import Pairs
from ...evaluate.evaluate import Evaluated
from ...options import PlacementOptions, Search, StageHops
from ...task import Task
from ..placement import PlacementStrategy
from ..strategy import Solution
from .proof import Proof
from .recheck import recheck
from .sections import remarks, sections, stays_in_force
from .solve import (
    objective,
    params_of,
    place,
    previous_contender,
    reconsidered,
    replanned,
    searched,
    vectors_a_move,
)

__all__ = ["STRATEGY"]


class Exflow(PlacementStrategy):
    """Experts that follow each other live together."""

    name = "exflow"
    dispatch_models = ("coherent", "standard")
    place = staticmethod(place)
    recheck = staticmethod(recheck)
    remarks = staticmethod(remarks)
    sections = staticmethod(sections)

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

    def to_apply(self, plan: Plan) -> bool:
        """Whether no plan in force is better kept."""
        return not stays_in_force(plan)

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
        cost = replanned(solution.decision, evaluated, task)
        return dataclasses.replace(solution, options=solution.options.model_copy(update={"replanned": cost}))


STRATEGY = Exflow()
