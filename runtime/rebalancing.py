"""The policy by which a plan's replicas follow the load, and its tables.

Legend: L MoE layers; E experts; D devices; S slots of a device.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InputError
from ..solvers.arrays import Bools, Ints
from ..solvers.placement import Placement, ReplicaRule
from .decisions import RebalancingDecision

if TYPE_CHECKING:
    from ..solvers.flexmoe import Costs, Decide

Schedule = Mapping[int, ArrayLike]

EMPTY = -1  # in a slot that holds no expert


def policy_of(decision: RebalancingDecision) -> "tuple[Decide, Costs]":
    """The rule that decides, and the rates that it decides by."""
    from ..solvers.flexmoe import Costs, Paper, Policy

    costs = Costs(**{name: type(Costs._field_defaults.get(name, 0.0))(one) for name, one in decision.costs.items()})
    if decision.method == "paper":
        return Paper(decision.trigger), costs
    policy = Policy(
        trigger=decision.trigger,
        every=decision.every,
        horizon=decision.horizon_steps,
        window=decision.window,
        recent=decision.recent or decision.window,
        evaluations=decision.evaluations,
        quantile=decision.quantile or 0.0,
    )
    return policy, costs


def tables_of(placement: Placement) -> Ints:
    """The expert in every slot of a placement with as many on each device, `[L, D, S]`."""
    table_LP = placement.physical_to_logical.astype(np.int64)
    return table_LP.reshape(placement.num_layers, placement.num_devices, -1)


def placement_of(table: Ints, num_experts: int) -> Placement:
    """The placement of one layer by a table `[D, S]`; steps are split by their counts.

    Raises
    ------
    InputError
        The table breaks a rule of placements.
    """
    held = [row[row != EMPTY].tolist() for row in table]
    return Placement.from_sets([held], num_experts, ReplicaRule.QUOTA)


def owners_hold(tables: Ints, owners: Ints) -> Bools:
    """Check which experts are in a slot of their owner, `[L, E]`: tables `[L, D, S]`, owners `[L, E]`."""
    slots_LES = tables[np.arange(len(tables))[:, None], owners]
    found: Bools = (slots_LES == np.arange(owners.shape[1])[:, None]).any(axis=2)
    return found


def checked_schedule(schedule: Schedule, start: Placement) -> dict[int, Ints]:
    """The tables of a schedule `[L, D, S]` by step.

    Raises
    ------
    InputError
        A table is of other sizes than the start, or breaks a rule of placements.
    """
    if not isinstance(schedule, Mapping) or not all(isinstance(step, int | np.integer) for step in schedule):
        raise InputError("a schedule that is no tables by step; expected a dict, as of moeplan.runtime.schedule_of")
    expected = tables_of(start).shape
    try:
        tables = {int(step): np.asarray(table) for step, table in schedule.items()}
    except ValueError as error:  # rows of unequal length
        raise InputError(f"a schedule with a table that has no shape ({error}); expected {list(expected)}") from None
    for step, table in sorted(tables.items()):
        if table.shape != expected or table.dtype.kind != "i" or step < 0:
            raise InputError(
                f"schedule, step {step}: a table {list(table.shape)} of {table.dtype}; expected whole numbers"
                f" {list(expected)} (layers, devices, slots), from step 0 on"
            )
        for layer, rows in enumerate(table):
            try:
                placement_of(rows, start.num_experts)
            except InputError as error:
                raise InputError(f"schedule, step {step}, layer {layer}: {error}") from None
    return {step: table.astype(np.int64) for step, table in tables.items()}
