"""Record of how replicas that follow the load were placed."""

from collections.abc import Mapping

from pydantic import Field, field_validator

from ....runtime.decisions import Record
from ....runtime.schedule import PLAN
from ...options import Options, Seconds


class RuleRecord(Record):
    """Record of what a rule did on the steps that judge."""

    changes: int = Field(ge=0)  #: Of a layer's placement
    violations: int = Field(ge=0)  #: Changes that cost more than they save within the horizon on what was seen
    figure: float = Field(ge=0)  #: What decides: seconds of a layer that placements change, or max/mean load
    unpaid: int = Field(ge=0)  #: Changes that cost more than they saved while they held, within the horizon
    experts_moved: int = Field(ge=0)
    planning_s: Seconds  #: CPU seconds of all decisions


class RebalancingOptions(Options):
    """Record of how replicas were placed, and when they follow the load."""

    key = "rebalancing"

    slots: int = Field(ge=1)  #: Of each device
    horizon: float | None = Field(gt=0)  #: As asked for; None: the best of those tried
    timed: bool  #: Whether it decides by seconds; else by balance alone
    #: What decides, seconds of a layer or max/mean load, on the fitted steps, by what was tried
    tried: Mapping[str, float] = {}
    followed: Mapping[str, RuleRecord] = Field(min_length=2)  #: By contender, the plan's own first

    @field_validator("followed")
    @classmethod
    def _with_plan(cls, followed: Mapping[str, RuleRecord]) -> Mapping[str, RuleRecord]:
        if PLAN not in followed:
            raise ValueError(f"no record of {PLAN!r}; expected those of the plan and of other rules")
        return followed
