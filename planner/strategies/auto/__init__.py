"""Auto: combinations of strategies, tried on an inner split; the best is solved anew."""

from dataclasses import dataclass
from typing import Literal

from ...params import Params, flag


@dataclass(frozen=True, kw_only=True)
class AutoParams(Params):
    """Parameters of auto: its time limit, and the engine that must carry its plan out."""

    time_limit_s: float | None = flag(
        None,
        "Seconds for the search.",
        name="time-limit",
        above=0,
        at_most=1e7,
        expected="seconds above 0, at most 1e7",
    )
    engine: Literal["sglang", "vllm", "vllm-ascend", "tensorrt-llm", "tutel"] | None = flag(
        None, "Keep to what this engine carries out."
    )
