"""Layers in chunks: where they are cut, the seconds they take, degrees chosen by them, timelines and the report."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ....errors import UsageError
from ...params import HOW, Params, flag

MAX_DEGREE = 1024
MAX_CAPACITY_FACTOR = 1024  # as `runtime.decisions` has it


@dataclass(frozen=True, kw_only=True)
class PipemoeParams(Params):
    """Parameters of pipemoe: which degrees may be chosen, and by which method."""

    methods: ClassVar[Mapping[str, str]] = {
        "exact": "Best degree per layer, by full search",
        "paper": "PipeMoE's Algorithm 1 as printed; a baseline",
        "robust": "Least regret under the profile's errors",
        "unequal": "Exact, and unequal chunks where faster",
    }

    method: Literal["exact", "paper", "robust", "unequal"] = flag("exact", HOW)
    max_degree: int | None = flag(
        None, "Chunks of a layer at most; 32, as Tutel.", at_least=1, at_most=MAX_DEGREE, expected="1 to 1,024"
    )
    joint: bool = flag(False, "One degree for the forward and the backward pass.")
    full_duplex: bool = flag(False, "Dispatches and combines may run at the same time.")
    capacity_factor: float | None = flag(
        None,
        "Fixed capacity: rows of an expert, over the mean.",
        above=0,
        at_most=MAX_CAPACITY_FACTOR,
        expected="above 0 and at most 1,024",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.joint and self.method == "unequal":
            raise UsageError("--joint with --method unequal; one degree for both passes is for equal chunks")
