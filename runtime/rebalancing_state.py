"""State of a rebalancer between two steps, as a checkpoint keeps it.

Legend: L MoE layers; E experts; D devices; S slots of a device.
"""

from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, MismatchError
from ..solvers.arrays import Ints
from .rebalancing import EMPTY, owners_hold, placement_of

if TYPE_CHECKING:
    from torch import Tensor

MOST = 2**62  # of what is counted
OPERATION = 6  # fields of one


class State(TypedDict):
    """Fields as the attributes of `Rebalancer`, where it has these."""

    step: int
    records: int  #: Seen so far
    deciding: bool  #: Whether the tables after the last record are still to be told
    tables: "Tensor"
    decided_last: "Tensor"  #: Tables that some layers may still have to take
    coming: list[int]  #: Layers whose new tables hold after the next step
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
    _check_fields(values)
    _check_numbers(values, like, num_experts)
    layers = len(like)
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
    waiting = np.flatnonzero((array_of(state["tables"]) != array_of(state["decided_last"])).any(axis=(1, 2))).tolist()
    whole = all(type(layer) is int for layer in values["coming"])
    if not whole or values["coming"] != sorted({*values["coming"]} & {*waiting}):
        raise MismatchError(f"a state of rebalancing with coming {values['coming']!r:.40}; expected some of {waiting}")
    for layer, expert in np.argwhere(~owners_hold(array_of(state["tables"]), owners)):
        raise MismatchError(
            f"a state of rebalancing with device {owners[layer, expert]} as owner of expert {expert} of layer {layer};"
            " expected one that holds it in tables"
        )


def _check_fields(values: dict[str, Any]) -> None:
    """Refuse lists that are none, and counts out of range."""
    sound = {name: isinstance(values[name], list | tuple) for name in ("window", "coming")}
    counts = dict.fromkeys(("step", "records", "moved", "planning_s"), MOST)
    for name, most in {**counts, "deciding": len(values["window"]) if sound["window"] else 0}.items():
        kind = int | float if name == "planning_s" else int
        sound[name] = isinstance(values[name], kind) and 0 <= values[name] <= most
    if unsound := [name for name, is_sound in sound.items() if not is_sound]:
        name = unsound[0]
        raise MismatchError(f"a state of rebalancing with {name} {values[name]!r:.40}; expected one of state_dict()")


def _check_numbers(values: dict[str, Any], like: Ints, num_experts: int) -> None:
    """Refuse tables, owners and records of other shapes than those of tables `[L, D, S]`, or out of range."""
    layers, devices, _ = like.shape
    expected: list[tuple[str, Any, tuple[int, ...], int, int]] = [
        *((name, values[name], like.shape, EMPTY, num_experts - 1) for name in ("tables", "decided_last")),
        ("owners", values["owners"], (layers, num_experts), 0, devices - 1),
        *(("a record of window", record, (layers, num_experts, devices), 0, MOST) for record in values["window"]),
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
