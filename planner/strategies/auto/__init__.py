"""Auto: what the strategies can decide together, tried on an inner split, and the best of it solved anew."""

from dataclasses import dataclass
from typing import Literal

from ...params import Params, flag


@dataclass(frozen=True, kw_only=True)
class AutoParams(Params):
    """Parameters of auto: how long it may try, and what must be able to carry its plan out."""

    time_limit_s: float | None = flag(
        None, "Seconds for the search.", name="time-limit", above=0, at_most=1e7, expected="seconds above 0"
    )
    engine: Literal["sglang", "vllm", "vllm-ascend", "tensorrt-llm", "tutel"] | None = flag(
        None, "Keep to what this engine carries out; moeplan.runtime carries out all."
    )
