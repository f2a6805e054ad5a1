"""The policy by which a plan's replicas follow the load, as evaluation and training both run it."""

from typing import TYPE_CHECKING

from .decisions import RebalancingDecision

if TYPE_CHECKING:
    from ..solvers.flexmoe import Costs, Decide


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
        evaluations=decision.evaluations,
    )
    return policy, costs
