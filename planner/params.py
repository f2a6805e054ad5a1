"""The parameters of the strategies: one declaration of a field gives its flag, help, bounds and default."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin

from ..errors import UsageError
from ..profilers.cluster import Cluster

MOST_DIGITS = 9
HOW = "How to solve; the strategy's own."  # help of flags that several strategies have
WHOLE = "Whole keeps each expert group in one block of slots."
MOST_LOAD = 4096  # of a device over the mean: all devices there may be
MAX_DEGREE = 1024
MAX_CAPACITY_FACTOR = 1024  # as `runtime.decisions` has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """The flag that a field is on the command line."""

    help: str
    name: str | None = None  #: Without dashes; None: the field's, with dashes for underscores
    metavar: str | None = None
    #: Turns the text given into the field's value; None: typer reads the field's type
    parse: Callable[[Any], Any] | None = None
    repeats: bool = False  #: Whether it may be given several times, `parse` then taking all of them
    #: at_least, above, at_most: bounds of a number, as `expected` words them
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    expected: str = ""


def flag(default: Any, help: str, **settings: Any) -> Any:  # noqa: A002  what it is on the command line
    """A field that is a flag; `settings` as in `Flag`."""
    return dataclasses.field(default=default, metadata={"flag": Flag(help=help, **settings)})


def flags_of(params: type) -> Iterator[tuple[str, Flag]]:
    """The fields of a dataclass that are flags."""
    return ((field.name, field.metadata["flag"]) for field in dataclasses.fields(params) if "flag" in field.metadata)


def option_of(field: str, one: Flag) -> str:
    """Name of a flag on the command line."""
    return f"--{one.name or field.replace('_', '-')}"


def choices(kind: Any) -> tuple[str, ...]:
    """The words that a type admits: those of a literal, or of one in a union."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return tuple(word for part in get_args(kind) for word in choices(part))
    return ()


@dataclass(frozen=True, kw_only=True)
class Params:
    """Parameters of one strategy: flags of `moeplan solve`. UsageError for a number out of bounds.

    Words are checked by `Request.of`.
    """

    mixes: ClassVar[bool] = False  # whether several traces may be planned for together
    replans: ClassVar[bool] = False  # whether a plan in force may be re-planned

    def __post_init__(self) -> None:
        for name, one in flags_of(type(self)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            low, high = (value if bound is None else bound for bound in (one.at_least, one.at_most))
            if not low <= value <= high or (one.above is not None and value <= one.above):
                raise UsageError(f"{option_of(name, one)} {value}; expected {one.expected}")

    @classmethod
    def of(cls, params: "Params") -> Self:
        """Parameters known to be of this kind, as those of a task are of its strategy's."""
        assert isinstance(params, cls)
        return params

    def check(self, cluster: Cluster) -> None:
        """Refuse what this cluster does not have."""


def _short_number(text: str) -> int | None:
    """The number that a text is, with a few digits and a sign at most; None where it is none."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS else None


def _slots_or_auto(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if (number := _short_number(text)) is None:
        raise UsageError(f"--redundant {text:.40}; expected a number of slots, or auto")
    return number


def _pins(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Experts and devices of `EXPERT@DEVICE` each."""
    pins = set()
    for text in texts:
        expert, _, device = text.partition("@")
        if None in [_short_number(one) if one.isdecimal() else None for one in (expert, device)]:
            raise UsageError(f"--pin {text:.40}; expected EXPERT@DEVICE, e.g. 12@3")
        pins.add((int(expert), int(device)))
    return tuple(sorted(pins))


@dataclass(frozen=True, kw_only=True)
class PlacementParams(Params):
    """Parameters of a strategy that places experts: the number of slots, by default the fewest equal ones."""

    weighs: ClassVar[bool] = False  #: Whether it may weigh how many replicas serve

    slots: int | None = flag(None, "Expert slots per device; surplus ones hold replicas.")
    redundant: int | Literal["auto"] = flag(
        0,
        "Extra slots per layer, over all devices; eplb: auto weighs how many.",
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
        "Cap: the busiest device at most so many times the mean, in each layer.",
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
    full_duplex: bool = flag(False, "Dispatches and combines do not share a channel.")
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
    dead: tuple[int, ...] = flag(
        (),
        "A rank without experts; may repeat.",
        metavar="RANK",
        parse=lambda ranks: tuple(sorted(set(ranks))),
        repeats=True,
    )
    pins: tuple[tuple[int, int], ...] = flag(
        (), "Held there in all layers; may repeat.", name="pin", metavar="EXPERT@DEVICE", parse=_pins, repeats=True
    )
    quantile: float | None = flag(
        None,
        "Make this quantile of the steps' balance least, not its mean.",
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
