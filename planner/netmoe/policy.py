"""What a plan's `options.sample_policy` says, so that its figures can be made again."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ...runtime.decisions import Record

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
    tried_s
        Where exchanges are timed and no method was asked for: of each method that was tried, the seconds of all timed
        parts of a fitted step. The plan has the fastest.
    """

    copies: Literal["devices", "pairs"]
    blind_copies: float = Field(ge=0)
    least_copies: float = Field(ge=0)
    tried_s: Mapping[str, Annotated[float, Field(ge=0)]] = {}

    @property
    def locality_index(self) -> float:
        """No homes save more than this share of the blind copies."""
        return 1 - self.least_copies / self.blind_copies if self.blind_copies else 0.0
