"""The schedule of a flexmoe plan: what was moved before which step, and every contender's balance, in a file beside it.

Legend: B steps; L MoE layers; O operations; D devices; S slots of a device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from ..errors import InputError, UsageError
from ..solvers.arrays import Floats, Ints
from .active import LoadedPlan
from .plan import Plan
from .rebalancing import EMPTY, tables_of

PLAN = "plan"  # the contender that is the plan itself
KINDS = ("expand", "shrink", "migrate")
COLUMNS = ("step", "layer", "kind", "expert", "from", "to")
MOST = 2**31  # of a step, a device, an expert, a balance
LONGEST = 100  # of a rule's name
FORMAT = "moeplan rebalancing schedule 1"


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Record of what a run did on recorded steps."""

    steps: Ints  #: The recorded steps, `[B]`
    #: Rows of `COLUMNS`, `[O, 6]`: from this step on an expert is on another device too (expand), no more on one
    #: (shrink), or on another instead (migrate); the kind by its number in `KINDS`, -1 for no device
    operations: Ints
    balance: Mapping[str, Floats]  #: Max/mean load of every step and layer, `[B, L]`, by contender

    @classmethod
    def beside(cls, plan: Plan, folder: Path) -> Self:
        """The schedule beside a plan in this folder; UsageError: there is none, else as `from_bytes`."""
        decision = plan.decisions.rebalancing
        if decision is None or decision.schedule is None:
            raise UsageError("no schedule beside the plan; expected one of moeplan solve --strategy flexmoe")
        return cls.from_bytes(decision.schedule.read(folder), plan.model.num_layers)

    def to_bytes(self) -> bytes:
        """A safetensors file of it, the same bytes every time."""
        from safetensors.numpy import save

        balance = {f"balance.{name}": values.astype(np.float32) for name, values in self.balance.items()}
        return save({"steps": self.steps, "operations": self.operations, **balance}, {"format": FORMAT})

    @classmethod
    def from_bytes(cls, contents: bytes, num_layers: int) -> Self:
        """The schedule in a file.

        Raises
        ------
        InputError
            The file is damaged, or holds something else.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            tensors = load(contents)
            steps, operations = tensors.pop("steps"), tensors.pop("operations")
        except (SafetensorError, KeyError) as error:
            raise InputError(f"the schedule beside the plan is damaged ({error}); run moeplan solve again") from error
        balance = {name.removeprefix("balance."): values for name, values in tensors.items()}
        shapes = {values.shape for values in balance.values()}
        shaped = steps.ndim == 1 and operations.shape[1:] == (len(COLUMNS),) and shapes == {(len(steps), num_layers)}
        if not all(name.isprintable() and len(name) <= LONGEST for name in balance):
            raise InputError("the schedule beside the plan names rules in no plain words; run moeplan solve again")
        if not shaped or not len(steps) or PLAN not in balance:
            raise InputError("the schedule beside the plan has tables of other shapes; run moeplan solve again")
        numbers = steps.dtype == operations.dtype == np.int64 and np.isin(operations[:, 2], range(len(KINDS))).all()
        numbers = numbers and steps[0] >= 0 and (np.diff(steps) > 0).all() and steps[-1] < MOST
        numbers = numbers and operations.max(initial=0) < MOST and (operations[:, 1] < num_layers).all()
        shrinks = operations[:, 2] == KINDS.index("shrink")  # to no device
        numbers = numbers and (operations[~shrinks] >= 0).all() and (operations[shrinks, :-1] >= 0).all()
        if not numbers or not all((values >= 1).all() and (values < MOST).all() for values in balance.values()):
            raise InputError("the schedule beside the plan holds no balances or operations; run moeplan solve again")
        return cls(steps, operations, balance)

    def tables(self, start: Ints) -> dict[int, Ints]:
        """The tables `[L, D, S]` by the step from which on they hold, of those that change, from `start` on.

        Raises
        ------
        InputError
            An operation takes an expert from where it is not, or finds no room.
        """
        table, tables = start.copy(), dict[int, Ints]()
        for step in np.unique(self.operations[:, 0]).tolist():
            rows = self.operations[self.operations[:, 0] == step, 1:].tolist()
            for arrives in (False, True):  # what leaves makes room
                for layer, kind, expert, source, target in rows:
                    if KINDS[kind] == ("shrink" if arrives else "expand"):
                        continue
                    device, old, new = (target, EMPTY, expert) if arrives else (source, expert, EMPTY)
                    try:
                        table[layer, device, np.flatnonzero(table[layer, device] == old)[0]] = new
                    except IndexError:
                        raise InputError(
                            f"the schedule beside the plan, step {step}, layer {layer}: no slot of device {device} for"
                            f" what happens to expert {expert}; run moeplan solve again"
                        ) from None
            tables[step] = table.copy()
        return tables


def schedule_of(plan: LoadedPlan) -> dict[int, Ints]:
    """Schedule of a flexmoe plan on the steps that judged it, to be replayed: `parallelize(..., schedule=...)`.

    Returns
    -------
    dict
        Tables `[L, D, S]` of the expert in every slot, -1 in an empty one, by the trace's number of the step from which
        on they hold.

    Raises
    ------
    UsageError
        The plan has no schedule.
    InputError
        The file is not there, damaged, or of another plan.
    """
    schedule = Schedule.beside(plan, plan.folder)
    assert plan.placement is not None
    return schedule.tables(tables_of(plan.placement))
