"""Record of how samples were re-homed, by netmoe and luffy."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ....runtime.plan import Metric
from ...options import Options

PLAN = "plan/migrating"  # label of the plan among its contenders


class SamplePolicyOptions(Options):
    """Record of how samples were re-homed, and of the most that this could save."""

    key = "sample_policy"

    #: What crosses: a copy a token and distinct device, or, where only counts are known, one a token-expert pair
    copies: Literal["devices", "pairs"]
    #: blind_copies, least_copies: copies a fitted step between nodes (on one node: between devices) in both exchanges
    #: around the layers' ends, next layers known: of samples dealt out blindly, and the fewest that any homes have
    #: (`solvers.netmoe.locality`)
    blind_copies: float = Field(ge=0)
    least_copies: float = Field(ge=0)
    #: What the plan has less of its verdict's metric than samples dealt by length alone, paired over steps
    over_dealt: Metric | None = None
    #: The same of the best of NetMoE's methods, where attention counts
    over_netmoe: Metric | None = None
    asked: bool = False  #: Whether the method was asked for
    #: Where exchanges are timed and no method was asked for: of each method that was tried, the seconds of all timed
    #: parts of a fitted step. The plan has the fastest.
    tried_s: Mapping[str, Annotated[float, Field(ge=0)]] = {}

    @property
    def locality_index(self) -> float:
        """Largest share of the blind copies that any homes save."""
        return 1 - self.least_copies / self.blind_copies if self.blind_copies else 0.0
