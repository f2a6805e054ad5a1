"""The parameters of strategies: one declaration of a field gives its flag, help, bounds and default.

Every strategy's own stand in the `__init__` of its folder.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin

from ..errors import UsageError
from ..profilers.cluster import Cluster

MOST_DIGITS = 9
HOW = "How to solve; see each below."  # help of flags that several strategies have
SLOTS = "Expert slots per device; surplus ones hold replicas."
HORIZON = "A move must pay within so many steps (flexmoe), or tokens (exflow --from)."
QUANTILE: Mapping[str, Any] = {
    "help": "Lower this quantile of what counts of steps, as 0.95, instead of their mean.",
    "above": 0,
    "at_most": 1,
    "expected": "above 0 and at most 1 (the worst step)",
}
WHOLE = "Whole keeps each expert group in one block of slots."


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """The flag that a field is on the command line."""

    help: str
    name: str | None = None  #: Without dashes; None: the field's, with dashes for underscores
    metavar: str | None = None
    #: Turns the text given into the field's value; None: typer reads the field's type
    parse: Callable[[Any], Any] | None = None
    repeats: bool = False  #: Whether it may be given several times, `parse` then taking all of them
    kind: type = str  #: Of each word that `parse` takes
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
    methods: ClassVar[Mapping[str, str]] = {}  #: What each word of `method` does, in one line of the help

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

    def within(self, limit_s: float, *, patient: bool = False) -> Self:
        """Limit the search to `limit_s`; with `patient`, to that much work of one core, however long it takes."""
        return self

    @property
    def without_replicas(self) -> "Params":
        """Copy without a number of replicas, to group candidates."""
        return self

    @property
    def decides(self) -> str:
        """Key of the decision asked for, of a strategy with several."""
        return ""

    def check(self, cluster: Cluster) -> None:
        """Refuse parameters that do not fit the cluster."""


def short_number(text: str) -> int | None:
    """The number that a text is, with a few digits and a sign at most; None where it is none."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS else None


def _slots_or_auto(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if (number := short_number(text)) is None:
        raise UsageError(f"--redundant {text:.40}; expected a number of slots, or auto")
    return number


@dataclass(frozen=True, kw_only=True)
class PlacementParams(Params):
    """Parameters of a strategy that places experts: the number of slots, by default the fewest equal ones."""

    weighs: ClassVar[bool] = False  #: Whether it may weigh how many replicas serve

    slots: int | None = flag(None, SLOTS)
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

    @property
    def without_replicas(self) -> Params:
        """Copy without a number of slots or replicas, to group candidates."""
        return dataclasses.replace(self, slots=None, redundant=0)
