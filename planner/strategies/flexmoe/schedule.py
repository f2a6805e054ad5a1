"""The schedule of a flexmoe plan: what was moved before which step, and every contender's balance, in a file beside it.

Legend: B steps; L MoE layers; O operations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from ....errors import InputError
from ....solvers.arrays import Floats, Ints
from ....solvers.flexmoe import Operation, Run
from ...evaluate.scene import Scene
from .rules import PLAN

KINDS = ("expand", "shrink", "migrate")
COLUMNS = ("step", "layer", "kind", "expert", "from", "to")
FORMAT = "moeplan rebalancing schedule 1"


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What a run did on recorded steps."""

    steps: Ints  #: The recorded steps, `[B]`
    #: Rows of `COLUMNS`, `[O, 6]`: from this step on an expert is on another device too (expand), no more on one
    #: (shrink), or on another instead (migrate); the kind by its number in `KINDS`, -1 for no device
    operations: Ints
    balance: Mapping[str, Floats]  #: Max/mean load of every step and layer, `[B, L]`, by contender

    @classmethod
    def of(cls, scene: Scene, runs: Mapping[str, Run]) -> Self:
        """What the plan did on the part that judges, and the balance of all rules; layers without load are even."""
        steps = scene.cohorts[-1].step_ids
        assert steps is not None
        rows = [_row(one, steps) for one in runs[PLAN].operations]
        operations = np.array(rows, np.int64).reshape(-1, len(COLUMNS))
        return cls(steps.astype(np.int64), operations, {name: np.maximum(run.balance, 1) for name, run in runs.items()})

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
        if not shaped or not len(steps) or PLAN not in balance:
            raise InputError("the schedule beside the plan has tables of other shapes; run moeplan solve again")
        numbers = steps.dtype == operations.dtype == np.int64 and np.isin(operations[:, 2], range(len(KINDS))).all()
        if not numbers or not all(np.isfinite(values).all() and (values >= 1).all() for values in balance.values()):
            raise InputError("the schedule beside the plan holds no balances or operations; run moeplan solve again")
        return cls(steps, operations, balance)


def _row(one: Operation, steps: Ints) -> tuple[int, ...]:
    return int(steps[one.record]), one.layer, KINDS.index(one.kind), one.expert, one.source, one.target
