"""A mixture: several traces, each with a weight, planned for together and judged by weighted means.

Legend: L MoE layers; E experts.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import numpy as np

from ...errors import MismatchError, UsageError
from ...traces.counts import Counts
from ..balance_options import Member
from ..evaluate import Evaluated, assembled, evaluate, measured, replayed
from ..measures.metrics import Figures
from ..measures.step_loads import loads_of
from ..measures.tally import Route
from ..task import Task

__all__ = ["Mixture"]

WHOLE = 2**40


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The traces of a task, one or several."""

    task: Task

    @cached_property
    def parts(self) -> list[tuple[float, Task]]:
        """A task a trace, with its weight; all weights together are 1.

        Raises
        ------
        MismatchError
            Traces of several models.
        UsageError
            Traces that split or make steps in several ways.
        """
        request, first = self.task.request, self.task
        if not request.mixture:
            return [(1.0, first)]
        total, found = sum(weight for _, weight in request.mixture), []
        for path, weight in request.mixture:
            one = dataclasses.replace(first, request=dataclasses.replace(request, trace=path, mixture=()))
            if one.model != first.model:
                raise MismatchError(
                    f"{path}: a trace of another model than {request.trace}; expected one model for all"
                )
            if one.evaluation_options != first.evaluation_options:
                raise UsageError(
                    f"{path}: it splits by {one.evaluation_options.unit}, {request.trace} by"
                    f" {first.evaluation_options.unit}, or steps and ranks are recorded in one of them alone; expected"
                    " traces of one kind: count them (moeplan trace count)"
                )
            found.append((weight / total, one))
        return found

    @property
    def members(self) -> tuple[Member, ...]:
        """What a plan says of it; nothing where it is of one trace."""
        if not self.task.request.mixture:
            return ()
        return tuple(
            Member(path=str(one.source.path), sha256=one.source.sha256, weight=weight) for weight, one in self.parts
        )

    def counts(self) -> Counts:
        """The loads of the fitted units; of several traces a layer of each adds up to its weight in `WHOLE`."""
        model, tokens, several = self.task.model, 0, bool(self.task.request.mixture)
        loads_LE = np.zeros((model.num_layers, model.num_experts), np.int64)
        for weight, one in self.parts:
            fitted_LE = loads_of(one.source, one.surveyed.unit_ids[one.fitted], phases=one.request.phases or None)
            total_L1 = np.maximum(fitted_LE.sum(axis=1, keepdims=True), 1)
            loads_LE += np.rint(weight * WHOLE * fitted_LE / total_L1).astype(np.int64) if several else fitted_LE
            tokens += int(one.surveyed.unit_tokens[one.fitted].sum())
        nothing = np.zeros((0, model.num_experts, model.num_experts), np.int64)
        return Counts(loads_LE, nothing, None, tokens)

    def evaluate(self, routes: Sequence[Route]) -> Evaluated:
        """Replay every route, the plan first, on the fitted and on the held-out units of every trace."""
        if not self.task.request.mixture:
            return evaluate(self.task, routes)
        by_trace = [(weight, one, one.cohorts) for weight, one in self.parts]
        rows = [replayed(one, cohorts, routes) for _, one, cohorts in by_trace]
        seed, model = self.task.request.seed, self.task.model
        figures = [
            measured(cohorts, row, model, seed=seed) for (_, _, cohorts), row in zip(by_trace, rows, strict=True)
        ]
        found = [
            {
                label: Figures.weighted(
                    [(weight, part[label]) for (weight, _, _), part in zip(by_trace, parts, strict=True)]
                )
                for label in parts[0]
            }
            for parts in zip(*figures, strict=True)
        ]
        cohorts = list(zip(*(one for _, _, one in by_trace), strict=True))
        return assembled(cohorts, [[*chain(*part)] for part in zip(*rows, strict=True)], found, self.task.speeds)
