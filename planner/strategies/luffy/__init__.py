"""LUFFY: every layer's combine delivers each sample to where attention and exchanges together take least."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ...params import HOW, Params, flag


@dataclass(frozen=True, kw_only=True)
class LuffyParams(Params):
    """Parameters of luffy."""

    methods: ClassVar[Mapping[str, str]] = {
        "joint": "Least attention plus exchange",
        "paper": "LUFFY's Algorithm 1, with minimum growth",
    }

    method: Literal["joint", "paper"] = flag("joint", HOW)
    batches: Literal["packed", "padded"] = flag(
        "packed", "How attention batches a device's samples.", name="attention-batches"
    )
    numbers: Literal["equal", "free"] = flag("equal", "Samples per device; free ones weigh losses.")
    room: float | None = flag(
        None,
        "Most tokens of a device over the mean, padding included.",
        metavar="X",
        at_least=1,
        at_most=1e6,
        expected="1 to 1,000,000",
    )
    candidates: int | None = flag(
        None, "paper: devices a sample may go to; half of them.", metavar="Q", at_least=1, expected="at least 1"
    )
