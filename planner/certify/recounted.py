"""A plan's task again, with its trace counted anew, row by row.

Legend: B steps; L MoE layers; E experts.
"""

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError, MismatchError, UsageError
from ...runtime.plan import Plan
from ...traces.count_form import CountTrace
from ..evaluate.scene import Scene
from ..options import EvaluationOptions
from ..params import flags_of
from ..request import Request
from ..strategies.placement import mixed_loads
from ..strategies.placement_options import PlacementOptions
from ..strategies.registry import STRATEGIES
from ..strategies.strategy import Strategy
from ..task import Task
from .certificate import path_of, trace_hash
from .naive import count_samples, naive_replay
from .structure import strategies_of

Mixture = tuple[tuple[str, float], ...]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Recounted(Task):
    """A task whose samples and units are counted naively."""

    bounds: ClassVar[bool] = False  # these are proved again by the strategy's recheck
    tallied = staticmethod(naive_replay)
    counter = staticmethod(count_samples)

    untimed: bool = False  #: Whether the profile is not at hand, so that nothing is timed

    @cached_property
    def scene(self) -> Scene:
        """Setting of the task, without costs where nothing is timed."""
        return replace(super().scene, costs=None) if self.untimed else super().scene


def task_of(plan: Plan, chosen: Strategy, trace: str, profile: Path | None, mixture: Mixture = ()) -> Recounted:
    """The task that one of a plan's strategies was given: on what was decided before, by the parameters it names.

    CertificationError where the strategy does not take them.
    """
    assert plan.inputs.trace is not None
    options, strategies, model = EvaluationOptions.of(plan), strategies_of(plan), chosen.dispatch_models[0]
    before = strategies[: strategies.index(chosen)]
    if chosen.decides == "placement":
        model = plan.options.get("placement", {}).get("dispatch_model", "standard")
    if model not in chosen.dispatch_models:
        raise CertificationError(f"options of {chosen.name} under {model}; it is {' or '.join(chosen.dispatch_models)}")
    own = dict(plan.options.get(chosen.decides, {}))
    stored = getattr(plan.decisions, chosen.decides).model_dump()
    stored |= (stored.get("attention") or {}) | (own.get("search") or {}) | own
    if not own.get("asked", True):  # the method was chosen, by what it is fast at
        stored.pop("method", None)
    try:
        request = Request.of(
            strategy=chosen.name,
            trace=trace,
            cluster=plan.cluster,
            profile=profile,
            phases=options.phases,
            fit_fraction=plan.inputs.trace.split.fit_fraction,
            seed=plan.seed,
            size=options.size,
            purpose=None if options.use is None else "training" if options.use == "training" else "serving",
            mixture=mixture,
            wire=plan.decisions.wire,
            engine_rule=options.engine_rule,
            waterfill=options.waterfill,
            **{name: _tupled(stored[name]) for name, _ in flags_of(STRATEGIES[chosen.name].params) if name in stored},
        )
    except UsageError as error:
        raise CertificationError(f"options of {chosen.name}: {error}") from error
    base = None
    if before:
        kept = {one.decides: getattr(plan.decisions, one.decides) for one in before}
        names = tuple(one.name for one in before)
        base = plan.model_copy(update={"decisions": type(plan.decisions)(**kept), "strategies": names})
    lost = plan.inputs.profile is not None and profile is None
    return Recounted(request, chosen, base, model, untimed=lost)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list | tuple) else value


def mixture_of(plan: Plan, first: str, sha256: str | None) -> Mixture | None:
    """The traces of a mixture with their weights, none where there is one; None where one is gone or was changed."""
    if "placement" not in plan.options:
        return ()
    members = PlacementOptions.of(plan).mixture
    if not members or len(plan.strategies) > 1:
        return ()
    if members[0].sha256 != sha256:
        raise MismatchError(f"{first}: not the first trace of the mixture; give {members[0].path}")
    if abs(sum(one.weight for one in members) - 1) > 1e-9:
        raise CertificationError(f"a mixture of weights {[one.weight for one in members]}; expected 1 in all")
    if None in [path_of(one, "", trace_hash) for one in members[1:]]:
        return None
    return tuple((first if one is members[0] else one.path, one.weight) for one in members)


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """Loads of experts `[L, E]`, and of every complete step `[B, L, E]`; how often an expert follows another
    `[L-1, E, E]` and stands beside another, either first `[L, E, E]`.
    """

    loads: Numbers
    steps: Numbers
    between: Numbers
    within: Numbers


def count_fitted(task: Recounted, *, followed: int, beside: bool) -> Fitted:
    """The counts of a task's fitted units; of a mixture loads alone, each layer's of every trace by its weight.

    So many of a token's choices are `followed` as followers of its first choice in the layer before; pairs `beside`
    each other inside layers are counted where asked for.
    """
    if not task.request.mixture:
        return _counted(task, followed, beside)
    parts = [(weight, _counted(one, 0, beside=False)) for weight, one in task.members]
    first, loads_LE = parts[0][1], mixed_loads((weight, part.loads) for weight, part in parts)
    return Fitted(loads_LE, first.steps[:0], first.between, first.within)


def _counted(task: Recounted, followed: int, beside: bool) -> Fitted:
    source, cohort, layers, experts = task.source, task.scene.cohorts[0], task.model.num_layers, task.model.num_experts
    loads, steps = np.zeros((layers, experts), np.int64), np.zeros((cohort.num_rows, layers, experts), np.int64)
    between, within = (np.zeros((size, experts, experts), np.int64) for size in (layers - 1, layers))
    if isinstance(source, CountTrace):
        for table in source.tables():
            unit_R = task.index.rows(table)
            fitted_R = np.isin(unit_R, cohort.unit_ids)
            np.add.at(loads, table.layer[fitted_R], table.counts[fitted_R])
            rows, step = cohort.locate_rows(unit_R)
            np.add.at(steps, (step, table.layer[rows]), table.counts[rows])
        return Fitted(loads, cohort.by_step(steps), between, within)
    for batch, unit_T in task.index.batches(source, task.request.phases or None):
        at = cohort.locate(batch, unit_T)
        for layer in range(layers):
            ids_RK = batch.ids[at.rows, layer]
            row, choice = np.nonzero(ids_RK < experts)
            np.add.at(loads[layer], ids_RK[row, choice], 1)
            row, choice = np.nonzero((ids_RK < experts) & (at.step >= 0)[:, None])
            np.add.at(steps[:, layer], (at.step[row], ids_RK[row, choice]), 1)
            for column in ids_RK.T[:followed] if layer else ():
                _add_pairs(between[layer - 1], batch.ids[at.rows, layer - 1, 0], column)
            for one, other in itertools.permutations(ids_RK.T, 2) if beside else ():
                apart = one != other  # an expert named twice is no pair
                _add_pairs(within[layer], one[apart], other[apart])
    return Fitted(loads, cohort.by_step(steps), between, within)


def _add_pairs(table: Numbers, one: NDArray[np.integer], other: NDArray[np.integer]) -> None:
    """Add the pairs of two choices of every token, both routed, `[E, E]`."""
    routed = (one < len(table)) & (other < len(table))
    np.add.at(table, (one[routed], other[routed]), 1)
