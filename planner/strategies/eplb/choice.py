"""The choice among placements of eplb, made on parts of the fitted units and never on units held out.

A candidate places layers by all parts but one and is judged on the steps of that one, each in turn. Published EPLB is
left only for one that is surely more even there.

Legend: B steps; L MoE layers, or those that a candidate is tried on; E experts; P parts.
"""

from collections.abc import Sequence

import numpy as np

from ....solvers import eplb
from ....solvers.arrays import Floats, Ints
from ....solvers.balance import step_ratios
from ....solvers.outcome import PlacementResult
from ....solvers.placement import Placement, ReplicaRule
from ...task import Task
from ..placement import mixed_loads
from . import EplbParams
from .options import By, Choice, Refined, Trial

# How the solver makes each; those by steps take loads step by step.
SOLVED: dict[By, eplb.Method] = {"published": "published", "sum": "refined", "steps": "refined", "robust": "robust"}
BY_STEPS = ("steps", "robust")
Weighted = Sequence[tuple[float, Ints]]  # of traces
TRIAL_LAYERS = 5  # judged on each part, for placements by steps, which take a hundred times as long as others
WRONG = 0.01  # of choices against published EPLB, at most, where no candidate is better; shared by the candidates


def choose(task: Task, slots: Ints) -> Choice:
    """The candidates of a task for slots `[D]`, judged on parts of the fitted units; none where there is but one."""
    if _num_parts(task) < 2:
        return Choice(reason="one unit was fitted, on which no gain over EPLB as published can be shown")
    task.say("choosing a placement on parts of the fitted samples")
    names = tried_by(mixed=bool(task.request.mixture))
    published_PL = _judged("published", task, slots)
    return Choice(candidates=tuple(_tried(name, published_PL, task, slots, WRONG / len(names)) for name in names))


def tried_by(*, mixed: bool) -> tuple[Refined, ...]:
    """The candidates beside published EPLB; steps of a mixture's traces have no weights in common."""
    return ("sum",) if mixed else ("sum", "steps", "robust")


def solved(name: By, loads: Ints, task: Task, slots: Ints) -> PlacementResult:
    """The placement of a candidate by loads `[L, E]`, or of steps `[B, L, E]`, as a task asks for it."""
    params = EplbParams.of(task.params)
    return eplb.solve(
        loads,
        task.request.cluster,
        slots=slots,
        num_groups=task.model.num_expert_groups,
        method=SOLVED[name],
        groups=params.groups,
        dead=params.dead,
        pins=params.pins,
        quantile=params.quantile,
        replica_rule=ReplicaRule(params.replica_rule),
        workers=task.workers,
    )


def loads_by(name: By, steps: Weighted) -> Ints:
    """The loads that a candidate places by, of the steps `[B, L, E]` of traces with weights."""
    if name in BY_STEPS:
        return steps[0][1]
    sums = [(weight, steps_BLE.sum(axis=0)) for weight, steps_BLE in steps]
    return sums[0][1] if len(sums) == 1 else mixed_loads(sums)


def left_out(task: Task, part: int, layers: slice = slice(None)) -> tuple[Weighted, Weighted]:
    """The steps `[B, L, E]` of every trace without a part, and of that part; twice the same where there is no other."""
    kept = [number for number in range(_num_parts(task)) if number != part] or [part]
    seen, unseen = (
        [
            (weight, np.concatenate([one.steps[1 + number][:, layers] for number in numbers]))
            for weight, one in task.members
        ]
        for numbers in (kept, [part])
    )
    return seen, unseen


def _num_parts(task: Task) -> int:
    """The number of parts that every trace's fitted units are in."""
    return min(len(member.in_parts.cohorts) for _, member in task.members)


def _tried(name: Refined, published_PL: Floats, task: Task, slots: Ints, wrong: float) -> Trial:
    """The balance of a candidate on the parts that it was not placed by, beside that of published EPLB.

    A layer counts once, by its mean over the parts that it was tried on, which are much alike.
    """
    ours_PL = _judged(name, task, slots)
    tried_PL = ~np.isnan(ours_PL)
    times_L = tried_PL.sum(axis=0)
    ours_L, published_L = (
        np.where(tried_PL, balance_PL, 0.0).sum(axis=0)[times_L > 0] / times_L[times_L > 0]
        for balance_PL in (ours_PL, published_PL)
    )
    return Trial(
        by=name,
        balance=float(ours_L.mean()),
        published=float(published_L.mean()),
        low=_lowest(published_L - ours_L, wrong),
    )


def _judged(by: By, task: Task, slots: Ints) -> Floats:
    """Mean balance of each part's steps, as placed by the other parts, `[P, L]`; NaN of layers that are not tried."""
    num_layers, num_parts = task.model.num_layers, _num_parts(task)
    stride = -(-num_layers // TRIAL_LAYERS) if by in BY_STEPS else 1
    balance_PL = np.full((num_parts, num_layers), np.nan)
    layers_P = [slice(part * stride // num_parts, None, stride) for part in range(num_parts)]

    for part, layers in enumerate(layers_P):
        seen, unseen = left_out(task, part, layers)
        placement = solved(by, loads_by(by, seen), task, slots).placement
        balance_PL[part, layers] = _mean_balance(unseen, placement)
    return balance_PL


def _mean_balance(steps: Weighted, placement: Placement) -> Floats:
    """The mean over steps of every layer's balance, of traces with weights, `[L]`."""
    mean_L: Floats = sum(
        weight * step_ratios(steps_BLE.astype(np.float64), placement).mean(axis=0) for weight, steps_BLE in steps
    )
    return mean_L


def _lowest(gain_L: Floats, wrong: float) -> float:
    """Lower end of the mean gain over layers, which it is below by chance this often; of one layer none is sure."""
    from scipy.special import stdtrit

    mean = float(gain_L.mean())
    if len(gain_L) < 2:
        return mean - abs(mean)
    return mean - float(stdtrit(len(gain_L) - 1, 1 - wrong) * gain_L.std(ddof=1) / np.sqrt(len(gain_L)))
