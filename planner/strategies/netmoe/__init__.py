"""NetMoE: every layer's combine delivers each sample to the device where its next experts are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ...params import HOW, Params, flag


@dataclass(frozen=True, kw_only=True)
class NetmoeParams(Params):
    """Parameters of netmoe; no method: the fastest of several where exchanges are timed, else sum."""

    methods: ClassVar[Mapping[str, str]] = {
        "sum": "Fewest copies between nodes, then inside them",
        "even": "The same, with about equal tokens on every device",
        "bottleneck": "Least seconds of the busiest port",
        "paper": "NetMoE as published; ignores the next layer",
    }

    method: Literal["sum", "even", "bottleneck", "paper"] | None = flag(None, HOW)
