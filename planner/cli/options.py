"""Options that commands share, as the words a user may choose from."""

from enum import StrEnum

from ..strategies.registry import STRATEGIES

__all__ = ["Dispatch", "Phase", "ReplicaRule", "Strategy"]


Strategy = StrEnum("Strategy", {name: name for name in STRATEGIES})  # type: ignore[misc]  # mypy reads literals


class ReplicaRule(StrEnum):
    """Which replica of an expert a token uses."""

    EVEN = "even"
    NEAREST = "nearest"
    STATIC = "static"
    ROUND_ROBIN = "round_robin"


class Dispatch(StrEnum):
    """The dispatch models there are."""

    STANDARD = "standard"
    COHERENT = "coherent"
    MIGRATING = "migrating"


class Phase(StrEnum):
    """The phases of tokens."""

    PREFILL = "prefill"
    DECODE = "decode"
    TRAIN = "train"
