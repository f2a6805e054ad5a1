"""Layers in chunks: where they are cut, the seconds they take, degrees chosen by them, timelines and the report."""

from dataclasses import dataclass
from typing import Literal

from ....errors import UsageError
from ...params import HOW, Params, flag

MAX_DEGREE = 1024
MAX_CAPACITY_FACTOR = 1024  # as `runtime.decisions` has it


@dataclass(frozen=True, kw_only=True)
class PipemoeParams(Params):
    """Parameters of pipemoe: which degrees may be chosen, and by which method."""

    method: Literal["exact", "paper", "robust", "unequal"] = flag("exact", HOW)
    max_degree: int | None = flag(
        None, "Chunks at most; 32, the most Tutel takes.", at_least=1, at_most=MAX_DEGREE, expected="1 to 1,024"
    )
    joint: bool = flag(False, "One degree for both passes.")
    full_duplex: bool = flag(False, "Dispatches and combines do not share a channel.")
    capacity_factor: float | None = flag(
        None,
        "Rows of an expert, over the mean; padded to the degrees.",
        above=0,
        at_most=MAX_CAPACITY_FACTOR,
        expected="above 0 and at most 1,024",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.joint and self.method == "unequal":
            raise UsageError("--joint with --method unequal; one degree for both passes is for equal chunks")
