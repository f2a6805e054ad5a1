"""The policy by which a plan's replicas follow the load, and its tables, as evaluation and training both have them."""

from typing import TYPE_CHECKING

import numpy as np

from ..solvers.arrays import Ints
from ..solvers.placement import Placement
from .decisions import RebalancingDecision

if TYPE_CHECKING:
    from ..solvers.flexmoe import Costs, Decide


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
