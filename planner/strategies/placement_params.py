"""The parameters of every strategy that places experts."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...errors import UsageError
from ..params import Params, flag

__all__ = ["PlacementParams", "number_of"]

MOST_DIGITS = 9


def number_of(text: str) -> int | None:
    """The number that a text is, with a few digits and a sign at most; None where it is none."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS else None


def _slots(text: str) -> int:
    number = number_of(text)
    if number is None:
        raise UsageError(f"--redundant {text:.40}; expected a number of slots, or auto")
    return number


def _slots_or_auto(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else _slots(text)


@dataclass(frozen=True, kw_only=True)
class PlacementParams(Params):
    """How many expert slots there are; without either one slot an expert, rounded up."""

    weighs: ClassVar[bool] = False  # whether it may weigh how many replicas serve

    slots: int | None = flag(None, "Expert slots per device; surplus ones hold replicas.")
    redundant: int | Literal["auto"] = flag(
        0,
        "Slots beyond one per expert, in all; eplb: auto weighs how many.",
        metavar="N|auto",
        parse=_slots_or_auto,
        at_least=0,
        expected="at least 0",
    )
    dead: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.redundant == "auto" and not self.weighs:
            raise UsageError("--redundant auto; only eplb weighs how many: give a number, or --strategy eplb")
        if self.slots is not None and self.redundant:
            raise UsageError("--slots and --redundant both say how many slots there are; give one of them")
