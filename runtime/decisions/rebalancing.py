"""Replicas that follow the load."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ...errors import InputError
from ...profilers.cluster import Cluster
from ...solvers.placement import ReplicaRule
from ...traces.model import ModelSpec
from .decision import Decision, SidecarFile
from .placement import PlacementDecision

MOST_STEPS, MOST_RECORDS, MOST_EVALUATIONS = 10**9, 4096, 100_000


class RebalancingDecision(Decision):
    """Replicas that follow the load while a model trains: where they start, and the policy by which they change."""

    key = "rebalancing"
    dispatch_models = ("standard",)

    method: Literal["search", "paper"]  #: `solvers.flexmoe.Policy` or `.Paper`
    start: PlacementDecision  #: The placement of the first step; later ones may leave slots empty
    trigger: float = Field(
        ge=1, le=MOST_STEPS
    )  #: Max/mean of the last step under its exact split, above which it plans
    horizon_steps: float = Field(gt=0, le=MOST_STEPS)  #: Steps over which a move must pay
    #: Of steps' seconds, or balance, which counts; None: their mean
    quantile: Annotated[float, Field(gt=0, le=1)] | None = None
    record_steps: int = Field(1, ge=1, le=MOST_STEPS)  #: It looks at the loads of one step in so many
    window: int = Field(ge=1, le=MOST_RECORDS)  #: Records, the last ones, over which a move must pay
    #: The last of these, which are planned for together; None: all
    recent: Annotated[int, Field(ge=1, le=MOST_RECORDS)] | None = None
    every: int = Field(ge=0, le=MOST_STEPS)  #: After one in so many records it plans even below the trigger; 0: never
    evaluations: int = Field(ge=0, le=MOST_EVALUATIONS)  #: Of the search by seconds, in each decision; 0: balance alone
    costs: Mapping[str, float]  #: Rates that it decides by: the fields of `solvers.flexmoe.Costs`
    schedule: SidecarFile | None = None  #: What it did on the trace it was judged on

    @property
    def stays(self) -> bool:
        """Check whether the placement of the first step is kept."""
        return self.trigger >= MOST_STEPS and not self.every

    def check(self, model: ModelSpec, cluster: Cluster, /) -> None:
        """Refuse a start that breaks a rule, and rates of other names or signs."""
        from ...solvers.flexmoe.costs import Costs

        self.start.check(model, cluster)
        if self.recent is not None and self.recent > self.window:
            raise InputError(
                f"rebalancing for {self.recent} of {self.window} records; expected no more than all of them"
            )
        if not isinstance(self.start.slots_per_device, int) or self.start.replica_rule is not ReplicaRule.QUOTA:
            raise InputError(
                "rebalancing from unequal slots, or not by quota; expected equal slots per device and quota"
            )
        if {*self.costs} != {*Costs._fields}:
            raise InputError(
                f"rebalancing by costs of {', '.join(sorted(self.costs))!s:.120}; expected {', '.join(Costs._fields)}"
            )
        if below := [name for name, cost in self.costs.items() if cost < 0]:
            raise InputError(f"rebalancing by {below[0]} {self.costs[below[0]]:g}; expected none below 0")
