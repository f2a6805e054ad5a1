"""Flags of `moeplan solve`: the fields of the strategies' parameters, each once, in a panel of those that have it."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import wraps
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import typer

from ..params import Flag, choices, flags_of, option_of
from ..strategies.registry import STRATEGIES

__all__ = ["StrategyFlags", "with_strategy_flags"]

StrategyFlags = dict[str, Any]


def with_strategy_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its last parameter `flags` spread into one flag for each field that any strategy has.

    It is given those that were set, by field name, as the parameters take them.
    """
    signature = inspect.signature(command)
    own = [parameter for name, parameter in signature.parameters.items() if name != "flags"]
    derived = {name: (kinds, one) for name, kinds, one in _derived()}

    @wraps(command)
    def with_flags(**given: Any) -> None:
        flags = {}
        for name, (_, one) in derived.items():
            value = given.pop(name)
            if value is not None and value is not False and value != []:  # 0 was said, and equals False
                value = value.value if isinstance(value, StrEnum) else value
                flags[name] = value if one.parse is None else one.parse(value)
        command(**given, flags=flags)

    spread = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotated(name, kinds, one))
        for name, (kinds, one) in derived.items()
    ]
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    hints = get_type_hints(command, include_extras=True)
    resolved = [parameter.replace(annotation=hints[parameter.name]) for parameter in keywords]
    with_flags.__signature__ = signature.replace(parameters=[*resolved, *spread])  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in (*resolved, *spread)}
    return with_flags


def _derived() -> Iterator[tuple[str, Mapping[str, Any], Flag]]:
    """Every field that is a flag, with its type under each strategy that has it; those of most strategies first."""
    kinds: dict[str, dict[str, Any]] = {}
    flags: dict[str, Flag] = {}
    for strategy, row in STRATEGIES.items():
        hints = get_type_hints(row.params)
        for name, one in flags_of(row.params):
            kinds.setdefault(name, {})[strategy] = hints[name]
            flags.setdefault(name, one)
    order = sorted(kinds, key=lambda name: -len(kinds[name]))
    yield from ((name, kinds[name], flags[name]) for name in order)


def _annotated(name: str, kinds: Mapping[str, Any], one: Flag) -> Any:
    default = next(
        default for row in STRATEGIES.values() for field, default in _defaults(row.params).items() if field == name
    )
    return Annotated[
        _typed(name, kinds, one) | None,
        typer.Option(
            option_of(name, one),
            help=one.help if default in (None, (), False, 0) or len(kinds) > 1 else f"{one.help}  [default: {default}]",
            metavar=one.metavar,
            show_default=False,
            rich_help_panel=", ".join(kinds),
        ),
    ]


def _defaults(params: type) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(params).parameters.items()}


def _typed(name: str, kinds: Mapping[str, Any], one: Flag) -> Any:
    """Type of a flag for typer: an enum of all strategies' choices, text to be parsed later, or the field's type."""
    words = list(dict.fromkeys(word for kind in kinds.values() for word in choices(kind)))
    if one.parse is not None:
        return list[int] if one.repeats and one.metavar == "RANK" else list[str] if one.repeats else str
    if words:
        return StrEnum(name, {word: word for word in words})
    plain = next(iter(kinds.values()))
    return next(kind for kind in get_args(plain) or (plain,) if kind is not NoneType)
