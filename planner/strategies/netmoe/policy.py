"""Schema of a plan's `options.sample_policy`, from which its figures can be made again."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ....runtime.decisions import Record
from ....runtime.plan import Metric
from ....solvers.netmoe import Locality

__all__ = ["SamplePolicyOptions"]


class SamplePolicyOptions(Record):
    """How samples were re-homed, and what that could save at most.

    Parameters
    ----------
    copies
        What crosses: a copy a token and distinct device, or, where only counts are known, one a token-expert pair.
    blind_copies, least_copies
        Copies a fitted step between nodes (on one node: between devices) in both exchanges around the layers' ends,
        next layers known: of samples dealt out blindly, and the fewest that any homes have (`solvers.netmoe.locality`).
    over_dealt
        What the plan has less of its verdict's metric than samples dealt by length alone, paired over steps.
    asked
        Whether the method was asked for.
    tried_s
        Where exchanges are timed and no method was asked for: of each method that was tried, the seconds of all timed
        parts of a fitted step. The plan has the fastest.
    """

    copies: Literal["devices", "pairs"]
    blind_copies: float = Field(ge=0)
    least_copies: float = Field(ge=0)
    over_dealt: Metric | None = None  # older plans
    asked: bool = False
    tried_s: Mapping[str, Annotated[float, Field(ge=0)]] = {}

    @property
    def locality_index(self) -> float:
        """No homes save more than this share of the blind copies."""
        return Locality(self.blind_copies, self.least_copies).share
