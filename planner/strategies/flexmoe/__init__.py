"""FlexMoE: replicas that follow the load while a model trains."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ....errors import UsageError
from ...params import HORIZON, HOW, QUANTILE, SLOTS, Params, flag


@dataclass(frozen=True, kw_only=True)
class FlexmoeParams(Params):
    """Parameters of flexmoe: room for replicas, and how patient it is."""

    methods: ClassVar[Mapping[str, str]] = {
        "search": "By the exact split of every step, and seconds",
        "paper": "FlexMoE's Algorithms 1 to 3, corrected",
    }

    slots: int | None = flag(None, SLOTS)
    method: Literal["search", "paper"] = flag("search", HOW)
    quantile: float | None = flag(None, **QUANTILE)
    horizon: float | None = flag(None, HORIZON, at_least=1, at_most=1e9, expected="1 step or more, at most 1e9")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantile is not None and self.method == "paper":
            raise UsageError("--quantile with --method paper, which goes by the last step alone; leave one out")
