"""The size of a step: samples, tokens of whole samples, or concurrent sequences; light, for the command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from ...errors import UsageError

Use = Literal["decode", "prefill", "training"]
Unit = Literal["samples", "tokens", "sequences"]
FIELDS: dict[Unit, str] = {"samples": "samples_per_step", "tokens": "tokens_per_step", "sequences": "concurrency"}
USUAL: dict[Use, int] = {"decode": 64, "prefill": 4096, "training": 8192}  # tokens of a step per device


@dataclass(frozen=True, slots=True)
class StepSize:
    """Amount that runs at once where steps were not recorded: samples, tokens of whole samples, or sequences.

    UsageError for a number out of range.
    """

    unit: Unit
    number: int

    def __post_init__(self) -> None:
        if not 1 <= self.number < 2**31:
            raise UsageError(f"{self.flag} {self.number}; expected at least 1 and below 2^31")

    @property
    def flag(self) -> str:
        """Flag that gives it."""
        return f"--{FIELDS[self.unit].replace('_', '-')}"

    def times(self, factor: float) -> Self:
        """Another size, at least one."""
        return type(self)(self.unit, max(round(self.number * factor), 1))


def size_of(
    *, samples_per_step: int | None = None, tokens_per_step: int | None = None, concurrency: int | None = None
) -> StepSize | None:
    """The size that is given, None without any; UsageError for several, or a number out of range."""
    numbers = zip(FIELDS, (samples_per_step, tokens_per_step, concurrency), strict=True)
    sizes = [StepSize(unit, number) for unit, number in numbers if number is not None]
    if len(sizes) > 1:
        raise UsageError(f"{' and '.join(size.flag for size in sizes)} each say how large a step is; give one of them")
    return sizes[0] if sizes else None


def use_of(phases: Sequence[str], size: StepSize | None, purpose: str | None = None, *, whole: bool) -> Use | None:
    """Use that tokens of these phases have: by the size or the purpose, else by the phases; None for counts.

    Decode goes by single tokens; where only `whole` samples can be told, they stand for prefill.
    """
    if size is not None and size.unit == "sequences":
        return "decode"
    if purpose == "training" or (purpose is None and tuple(phases) == ("train",)):
        return "training"
    if size is None and tuple(phases) == ("decode",) and not whole:
        return "decode"
    return "prefill" if phases or purpose else None


def as_prompts(phases: Sequence[str], use: Use | None) -> bool:
    """Check whether decoded tokens stand for those of prompts."""
    return tuple(phases) == ("decode",) and use == "prefill"


def usual_size(use: Use | None, num_devices: int) -> StepSize:
    """The size of a step that is usual for a use."""
    use = use or "prefill"
    return StepSize("sequences" if use == "decode" else "tokens", USUAL[use] * num_devices)
