"""The strategies there are: a row each, with the parameters of which `moeplan solve` makes its flags.

Rows are light; what a strategy does is imported when it is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ..params import Params, flag

if TYPE_CHECKING:
    from .strategy import Strategy

__all__ = [
    "MAX_DEGREE",
    "STRATEGIES",
    "EplbParams",
    "ExflowParams",
    "NetmoeParams",
    "Objective",
    "PipemoeParams",
    "PlacementParams",
    "Row",
    "strategy",
]

Objective = Literal["hops", "copies"]
MOST_DIGITS = 9
MOST_LOAD = 4096  # of a device over the mean: all devices there may be
MAX_DEGREE = 1024
MAX_CAPACITY_FACTOR = 1024  # as `runtime.decisions` has it
HOW = "How to solve; the strategy's own."
WHOLE = "Whole keeps each expert group in one block of slots."


def _number(text: str) -> int | None:
    """The number that a text is, with a few digits and a sign at most; None where it is none."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS else None


def _slots_or_auto(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if (number := _number(text)) is None:
        raise UsageError(f"--redundant {text:.40}; expected a number of slots, or auto")
    return number


def _pins(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Experts and devices of `EXPERT@DEVICE` each."""
    pins = set()
    for text in texts:
        expert, at, device = text.partition("@")
        if not at or not (expert.isdecimal() and device.isdecimal()) or None in (_number(expert), _number(device)):
            raise UsageError(f"--pin {text:.40}; expected EXPERT@DEVICE, e.g. 12@3")
        pins.add((int(expert), int(device)))
    return tuple(sorted(pins))


def _ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ranks)))


@dataclass(frozen=True, kw_only=True)
class PlacementParams(Params):
    """Parameters of a strategy that places experts: how many slots there are; without either one an expert, rounded up.

    Attributes
    ----------
    weighs
        Whether it may weigh how many replicas serve.
    """

    weighs: ClassVar[bool] = False

    slots: int | None = flag(None, "Expert slots per device; surplus ones hold replicas.")
    redundant: int | Literal["auto"] = flag(
        0,
        "Slots beyond one per expert, in all; eplb: auto weighs how many.",
        metavar="N|auto",
        parse=_slots_or_auto,
        at_least=0,
        expected="at least 0",
    )
    dead: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.redundant == "auto" and not self.weighs:
            raise UsageError("--redundant auto; only eplb weighs how many: give a number, or --strategy eplb")
        if self.slots is not None and self.redundant:
            raise UsageError("--slots and --redundant both say how many slots there are; give one of them")


@dataclass(frozen=True, kw_only=True)
class ExflowParams(PlacementParams):
    """Parameters of exflow: how experts that follow each other are kept together."""

    replans: ClassVar[bool] = True

    method: Literal["annealing", "sweeps", "ilp", "paper"] = flag("annealing", HOW)
    groups: Literal["split", "whole"] = flag("split", WHOLE)
    backend: Literal["ortools", "pulp"] = flag("ortools", "What solves ilp and paper.")
    time_limit_s: float = flag(
        30.0, "Seconds for the search.", name="time-limit", above=0, at_most=1e7, expected="seconds above 0"
    )
    objective: Literal["hops", "copies"] | None = flag(None, "What to save; hops, or under standard dispatch copies.")
    bound: Literal["simple", "thorough"] = flag(
        "simple", "Thorough takes up to 10 minutes after the time limit, or Ctrl-C."
    )
    max_load: float | None = flag(
        None,
        "Most tokens of a device in a layer, over the mean.",
        at_least=1,
        at_most=MOST_LOAD,
        expected="1 (all devices alike) or more, of the mean",
    )
    horizon_tokens: float | None = flag(
        None,
        "With --from: tokens within which a move must pay for itself.",
        name="horizon",
        at_least=1,
        at_most=1e18,
        expected="1 token or more, below 1e18, beside --from",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend != "ortools" and self.method not in ("ilp", "paper"):
            raise UsageError(f"--backend {self.backend} without exflow's --method ilp or paper, all that it solves")
        if self.objective == "copies" and self.method != "annealing":
            raise UsageError(f"--objective copies with --method {self.method}; only annealing knows of it")
        if self.groups == "whole" and self.redundant:
            raise UsageError(
                "--groups whole with --redundant; whole groups take one slot an expert, equally many a device"
            )


@dataclass(frozen=True, kw_only=True)
class PipemoeParams(Params):
    """Parameters of pipemoe: which degrees may be chosen, and by which method."""

    method: Literal["exact", "paper", "robust", "unequal"] = flag("exact", HOW)
    max_degree: int | None = flag(
        None, "Chunks at most; 32, the most Tutel takes.", at_least=1, at_most=MAX_DEGREE, expected="1 to 1,024"
    )
    joint: bool = flag(False, "One degree for both passes.")
    full_duplex: bool = flag(False, "Combines have a channel of their own.")
    capacity_factor: float | None = flag(
        None,
        "Rows of an expert, over the mean; padded to the degrees.",
        above=0,
        at_most=MAX_CAPACITY_FACTOR,
        expected="above 0 and at most 1,024",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.joint and self.method == "unequal":
            raise UsageError("--joint with --method unequal; one degree for both passes is for equal chunks")


@dataclass(frozen=True, kw_only=True)
class NetmoeParams(Params):
    """Parameters of netmoe; no method: the fastest of several where exchanges are timed, else sum."""

    method: Literal["sum", "even", "bottleneck", "paper"] | None = flag(None, HOW)


@dataclass(frozen=True, kw_only=True)
class EplbParams(PlacementParams):
    """Parameters of eplb: how loads are made even."""

    mixes: ClassVar[bool] = True
    weighs: ClassVar[bool] = True

    method: Literal["refined", "published"] = flag("refined", HOW)
    groups: Literal["split", "whole"] = flag("split", WHOLE)
    dead: tuple[int, ...] = flag((), "A rank without experts; may repeat.", metavar="RANK", parse=_ranks, repeats=True)
    pins: tuple[tuple[int, int], ...] = flag(
        (), "Held there in all layers; may repeat.", name="pin", metavar="EXPERT@DEVICE", parse=_pins, repeats=True
    )
    quantile: float | None = flag(
        None,
        "Of the recorded steps' balance, instead of its mean.",
        above=0,
        at_most=1,
        expected="above 0 and at most 1 (the worst step)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "published" and self.quantile is not None:
            raise UsageError("--quantile with --method published, which goes by all loads together; leave one out")
        if self.groups == "whole" and (self.redundant or self.dead):
            raise UsageError(
                "--groups whole with --redundant or --dead; whole groups take one slot an expert, equally many a device"
            )

    def check(self, cluster: Cluster) -> None:
        """Refuse devices that the cluster does not have, and none alive."""
        size = cluster.num_devices
        if wrong := [rank for rank in (*self.dead, *(device for _, device in self.pins)) if not 0 <= rank < size]:
            raise UsageError(f"--dead or --pin of device {wrong[0]}; expected 0 to {size - 1} on {cluster}")
        if len(self.dead) > size - 1:
            raise UsageError(f"--dead {size} times; expected a device that is alive")
        if lost := [pin for pin in self.pins if pin[1] in self.dead]:
            raise UsageError(f"--pin {lost[0][0]}@{lost[0][1]}; device {lost[0][1]} is --dead: pin it elsewhere")


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy's parameters, and where its `STRATEGY` is."""

    params: type[Params]
    module: str


STRATEGIES = {
    "exflow": Row(ExflowParams, f"{__package__}.exflow.strategy"),
    "pipemoe": Row(PipemoeParams, f"{__package__}.pipemoe.strategy"),
    "netmoe": Row(NetmoeParams, f"{__package__}.netmoe.strategy"),
    "eplb": Row(EplbParams, f"{__package__}.eplb.strategy"),
    "contiguous": Row(PlacementParams, f"{__package__}.placement"),
}


def strategy(name: str) -> "Strategy":
    """The strategy of that name."""
    if name not in STRATEGIES:
        raise UsageError(f"--strategy {name}; expected one of {', '.join(STRATEGIES)}")
    chosen: Strategy = import_module(STRATEGIES[name].module).STRATEGY
    return chosen
