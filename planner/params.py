"""The parameters of a strategy: one declaration of a field gives its flag, help, bounds and default."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from ..errors import UsageError
from ..profilers.cluster import Cluster

__all__ = ["Flag", "Params", "choices", "flag", "flags_of", "option_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """The flag that a field is on the command line.

    Parameters
    ----------
    name
        Without dashes; None: the field's, with dashes for underscores.
    parse
        Turns the text given into the field's value; None: typer reads the field's type.
    repeats
        Whether it may be given several times, `parse` then taking all of them.
    at_least, above, at_most
        Bounds of a number, as `expected` words them.
    """

    help: str
    name: str | None = None
    metavar: str | None = None
    parse: Callable[[Any], Any] | None = None
    repeats: bool = False
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    expected: str = ""

    def admits(self, value: Any) -> bool:
        """Whether a number is within the bounds."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )


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
    """Parameters of one strategy. Its fields are flags of `moeplan solve`.

    Raises
    ------
    UsageError
        A number beyond its flag's bounds, a word that is none of its choices.
    """

    mixes: ClassVar[bool] = False  # whether several traces may be planned for together

    replans: ClassVar[bool] = False  # whether a plan in force may be re-planned

    def __post_init__(self) -> None:
        for name, one in flags_of(type(self)):
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not one.admits(value):
                raise UsageError(f"{option_of(name, one)} {value}; expected {one.expected}")

    def check(self, cluster: Cluster) -> None:
        """Refuse what this cluster does not have."""
