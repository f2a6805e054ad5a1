"""The size of a step: samples, tokens of whole samples, or concurrent sequences; light, for the command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

Use = Literal["decode", "prefill", "training"]
Unit = Literal["samples", "tokens", "sequences"]
USUAL: dict[Use, int] = {"decode": 64, "prefill": 4096, "training": 8192}  # tokens of a step per device


@dataclass(frozen=True, slots=True)
class StepSize:
    """Amount that runs at once where steps were not recorded: samples, tokens of whole samples, or sequences."""

    unit: Unit
    number: int

    @property
    def flag(self) -> str:
        """Flag that gives it."""
        return {"samples": "--samples-per-step", "tokens": "--tokens-per-step", "sequences": "--concurrency"}[self.unit]

    def times(self, factor: float) -> Self:
        """Another size, at least one."""
        return type(self)(self.unit, max(round(self.number * factor), 1))


def sizes_of(samples: int | None, tokens: int | None, sequences: int | None) -> list[StepSize]:
    """The sizes that are given."""
    numbers: tuple[tuple[Unit, int | None], ...] = (("samples", samples), ("tokens", tokens), ("sequences", sequences))
    return [StepSize(unit, number) for unit, number in numbers if number is not None]


def size_of(samples: int | None, tokens: int | None, sequences: int | None) -> StepSize | None:
    """The first size that is given; None without any."""
    return next(iter(sizes_of(samples, tokens, sequences)), None)


def use_of(phases: Sequence[str], size: StepSize | None, purpose: str | None = None, *, whole: bool) -> Use | None:
    """What tokens of these phases run in: as a size or the purpose says, else they; None of counts, which have none.

    Decode goes by single tokens; where only `whole` samples can be told, they stand for prefill.
    """
    if size is not None and size.unit == "sequences":
        return "decode"
    if purpose == "training" or (purpose is None and tuple(phases) == ("train",)):
        return "training"
    if size is None and tuple(phases) == ("decode",) and not whole:
        return "decode"
    return "prefill" if phases or purpose else None


def usual_size(use: Use | None, num_devices: int) -> StepSize:
    """The size of a step that is usual for a use."""
    use = use or "prefill"
    return StepSize("sequences" if use == "decode" else "tokens", USUAL[use] * num_devices)
