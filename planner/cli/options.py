"""Options that commands share, as the words a user may choose from."""

from enum import StrEnum

__all__ = ["Backend", "Bound", "Dispatch", "Groups", "Method", "Objective", "Phase", "ReplicaRule", "Strategy"]


class Strategy(StrEnum):
    """The strategies, as `planner.strategy.STRATEGIES` lists them."""

    EXFLOW = "exflow"
    PIPEMOE = "pipemoe"
    NETMOE = "netmoe"
    EPLB = "eplb"
    CONTIGUOUS = "contiguous"


class Method(StrEnum):
    """How a strategy solves; `planner.strategy.STRATEGIES` says which has which."""

    ANNEALING = "annealing"
    SWEEPS = "sweeps"
    ILP = "ilp"
    EXACT = "exact"
    PAPER = "paper"
    ROBUST = "robust"
    UNEQUAL = "unequal"
    SUM = "sum"
    EVEN = "even"
    BOTTLENECK = "bottleneck"
    REFINED = "refined"
    PUBLISHED = "published"


class Backend(StrEnum):
    """What solves the integer programmes."""

    ORTOOLS = "ortools"
    PULP = "pulp"


class Bound(StrEnum):
    """How exflow is bounded."""

    SIMPLE = "simple"
    THOROUGH = "thorough"


class Objective(StrEnum):
    """What exflow keeps together."""

    HOPS = "hops"
    COPIES = "copies"


class Groups(StrEnum):
    """Whether expert groups may be split between devices."""

    SPLIT = "split"
    WHOLE = "whole"


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
