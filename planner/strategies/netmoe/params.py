"""Parameters of netmoe."""

from dataclasses import dataclass
from typing import Literal

from ...params import Params, flag

__all__ = ["NetmoeParams"]


@dataclass(frozen=True, kw_only=True)
class NetmoeParams(Params):
    """How samples are re-homed; None: by the fastest of several methods where exchanges are timed, else by sums."""

    method: Literal["sum", "even", "bottleneck", "paper"] | None = flag(None, "How to solve; the strategy's own.")
