"""NetMoE: every layer's combine delivers each sample to the device where its next experts are."""

from dataclasses import dataclass
from typing import Literal

from ...params import HOW, Params, flag


@dataclass(frozen=True, kw_only=True)
class NetmoeParams(Params):
    """Parameters of netmoe; no method: the fastest of several where exchanges are timed, else sum."""

    method: Literal["sum", "even", "bottleneck", "paper"] | None = flag(None, HOW)
