"""The policy by which a plan's replicas follow the load, its tables, and what a training keeps of both.

Legend: L MoE layers; E experts; D devices; S slots of a device.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, MismatchError
from ..solvers.arrays import Bools, Ints
from ..solvers.placement import Placement, ReplicaRule
from .decisions import RebalancingDecision

if TYPE_CHECKING:
    from torch import Tensor

    from ..solvers.flexmoe import Costs, Decide

Schedule = Mapping[int, ArrayLike]

EMPTY = -1  # in a slot that holds no expert
MOST = 2**62  # of what is counted
OPERATION = 6  # fields of one


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


class State(TypedDict):
    """State of a rebalancer between two steps; fields as its attributes, where it has these."""

    step: int
    records: int  #: Seen so far
    deciding: bool  #: Whether the tables after the last record are still to be told
    tables: "Tensor"
    decided_last: "Tensor"  #: Tables that some layers may still have to take
    owners: "Tensor"  #: The device that owns each expert, `[L, E]`
    window: "list[Tensor]"  #: The last records `[L, E, D]`, the latest last
    balance: "Tensor"
    operations: list[tuple[Any, ...]]
    moved: int
    planning_s: float


def array_of(value: Any) -> NDArray[Any]:
    """Numbers of a tensor, on whatever device it is, or of rows; MismatchError where these have no shape."""
    try:
        return np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    except ValueError as error:
        raise MismatchError(f"a state of rebalancing with numbers of no shape ({error})") from None


def check_state(state: State, like: Ints, num_experts: int) -> None:
    """Refuse a state of other sizes than tables `[L, D, S]`, or that breaks a rule, with MismatchError."""
    if lacking := State.__required_keys__ - state.keys():
        raise MismatchError(f"a state of rebalancing without {min(lacking)}; expected one of state_dict()")
    values: dict[str, Any] = {**state}
    if not isinstance(window := values["window"], list | tuple):
        raise MismatchError(f"a state of rebalancing with window {window!r:.40}; expected one of state_dict()")
    counts = dict.fromkeys(("step", "records", "moved", "planning_s"), MOST)
    for name, most in {**counts, "deciding": len(window)}.items():
        kind = int | float if name == "planning_s" else int
        if not isinstance(values[name], kind) or not 0 <= values[name] <= most:
            raise MismatchError(
                f"a state of rebalancing with {name} {values[name]!r:.40}; expected one of state_dict()"
            )
    layers, devices, _ = like.shape
    expected: list[tuple[str, Any, tuple[int, ...], int, int]] = [
        *((name, values[name], like.shape, EMPTY, num_experts - 1) for name in ("tables", "decided_last")),
        ("owners", state["owners"], (layers, num_experts), 0, devices - 1),
        *(("a record of window", record, (layers, num_experts, devices), 0, MOST) for record in window),
    ]
    for name, value, shape, least, most in expected:
        numbers = array_of(value)
        alike = numbers.shape == shape and numbers.dtype.kind == "i"
        if not alike or numbers.min() < least or numbers.max() > most:
            found = f", {numbers.min()} to {numbers.max()}" if alike else ""
            raise MismatchError(
                f"a state of rebalancing with {name} {[*numbers.shape]} of {numbers.dtype}{found}; expected whole"
                f" numbers {[*shape]} from {least}{'' if most == MOST else f' to {most}'}: load it under its plan"
            )
    for name in ("tables", "decided_last"):
        for layer, table in enumerate(array_of(values[name])):
            try:
                placement_of(table, num_experts)
            except InputError as error:
                raise MismatchError(f"a state of rebalancing with {name}, layer {layer}: {error}") from None
    balance, operations = array_of(values["balance"]), values["operations"]
    if balance.shape != (layers,) or balance.dtype.kind != "f" or not np.isfinite(balance).all():
        raise MismatchError(
            f"a state of rebalancing with balance {[*balance.shape]} of {balance.dtype}; expected {layers} numbers"
        )
    if not isinstance(operations, list | tuple) or any(len(one) != OPERATION for one in operations):
        raise MismatchError(f"a state of rebalancing with operations {operations!r:.40}; expected rows of {OPERATION}")
    owners = array_of(state["owners"])
    for layer, expert in np.argwhere(~owners_hold(array_of(state["tables"]), owners)):
        raise MismatchError(
            f"a state of rebalancing with device {owners[layer, expert]} as owner of expert {expert} of layer {layer};"
            " expected one that holds it in tables"
        )
