"""What a plan's `options` say of replicas for balance: what was weighed and held against one another."""

from typing import Literal

from pydantic import Field

from ..runtime.decisions import Record, Sha256

NEAR = 1.02

__all__ = ["Candidate", "Member", "PhaseSwap", "RawBalance", "Redundancy"]


class RawBalance(Record):
    """What EPLB gives as published, unrepaired, on the fitted loads together.

    Parameters
    ----------
    balance, duplicates
        Mean over layers of max/mean device load, and slots whose expert is on that device already: no engine may load
        such a plan.
    repaired, plan
        The balance on the same loads of EPLB as repaired, and of the plan.
    """

    balance: float = Field(ge=1 - 1e-9)
    duplicates: int = Field(ge=0)
    repaired: float = Field(ge=1 - 1e-9)
    plan: float = Field(ge=1 - 1e-9)


class Candidate(Record):
    """So many redundant experts a layer, and what they give on the part that judges.

    Parameters
    ----------
    slots
        Of each device.
    seconds
        Predicted of a step, or of its experts (`Redundancy.metric`); None without a profile.
    memory_bytes
        Of the experts of all layers on a device; None where the sizes of the model are not known.
    """

    redundant: int = Field(ge=0)
    slots: int = Field(ge=1)
    balance: float = Field(ge=1 - 1e-9)
    balance_p95: float = Field(ge=1 - 1e-9)
    seconds: float | None = Field(ge=0)
    memory_bytes: int | None


class Redundancy(Record):
    """How many redundant experts were weighed, and by what.

    Parameters
    ----------
    metric
        What the fewest within 2 % of the best were chosen by.
    """

    metric: Literal["step_s", "experts_s", "balance"]
    held_out: bool
    candidates: tuple[Candidate, ...] = Field(min_length=1)

    @property
    def chosen(self) -> Candidate:
        """The one with the fewest whose metric is within 2 % of the best."""
        figures = [one.balance if self.metric == "balance" else one.seconds or 0.0 for one in self.candidates]
        good = [one for one, found in zip(self.candidates, figures, strict=True) if found <= NEAR * min(figures)]
        return min(good, key=lambda one: one.redundant)


class Member(Record):
    """A trace of a mixture; weights sum to 1."""

    path: str
    sha256: Sha256
    weight: float = Field(gt=0, le=1)


class PhaseSwap(Record):
    """A plan made on one phase and judged on another.

    Parameters
    ----------
    balance, own, in_order
        On the held-out part of that other phase: of that plan, of one made on the phase itself, of contiguous experts.
    """

    made_on: Literal["prefill", "decode", "train"]
    judged_on: Literal["prefill", "decode", "train"]
    balance: float = Field(ge=1 - 1e-9)
    own: float = Field(ge=1 - 1e-9)
    in_order: float = Field(ge=1 - 1e-9)
