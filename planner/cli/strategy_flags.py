"""Flags of `moeplan solve`: the fields of the strategies' parameters, each once, in a panel of those that have it."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import wraps
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

from ..params import Flag, choices, flags_of, option_of
from ..strategies.registry import STRATEGIES
from .flags import optional

__all__ = ["StrategyFlags", "with_strategy_flags"]

StrategyFlags = dict[str, Any]


def with_strategy_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its last parameter `flags` spread into one flag for each field that any strategy has.

    It is given those that were set, by field name, as the parameters take them.
    """
    signature = inspect.signature(command)
    derived = _derived()

    @wraps(command)
    def with_flags(**given: Any) -> None:
        flags = {}
        for name, (_, one, _) in derived.items():
            value = given.pop(name)
            if value is not None and value is not False and value != []:  # 0 was said, and equals False
                value = value.value if isinstance(value, StrEnum) else value
                flags[name] = value if one.parse is None else one.parse(value)
        command(**given, flags=flags)

    spread = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotated(name, *of))
        for name, of in derived.items()
    ]
    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in signature.parameters.items()
        if name != "flags"
    ]
    with_flags.__signature__ = signature.replace(parameters=[*own, *spread])  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *spread)}
    return with_flags


def _derived() -> dict[str, tuple[dict[str, Any], Flag, Any]]:
    """Every field that is a flag: its type under each strategy that has it, the flag, and its default in the first.

    Those of most strategies come first.
    """
    derived: dict[str, tuple[dict[str, Any], Flag, Any]] = {}
    for strategy, row in STRATEGIES.items():
        hints = get_type_hints(row.params)
        defaults = {field.name: field.default for field in dataclasses.fields(row.params)}
        for name, one in flags_of(row.params):
            kinds, _, _ = derived.setdefault(name, ({}, one, defaults[name]))
            kinds[strategy] = hints[name]
    return dict(sorted(derived.items(), key=lambda item: -len(item[1][0])))


def _annotated(name: str, kinds: Mapping[str, Any], one: Flag, default: Any) -> Any:
    silent = default in (None, (), False, 0) or len(kinds) > 1
    return Annotated[
        _typed(name, kinds, one) | None,
        optional(
            one.help if silent else f"{one.help}  [default: {default}]",
            option_of(name, one),
            metavar=one.metavar,
            rich_help_panel=", ".join(kinds),
        ),
    ]


def _typed(name: str, kinds: Mapping[str, Any], one: Flag) -> Any:
    """Type of a flag for typer: an enum of all strategies' choices, text to be parsed later, or the field's type."""
    words = list(dict.fromkeys(word for kind in kinds.values() for word in choices(kind)))
    if one.parse is not None:
        return list[int] if one.repeats and one.metavar == "RANK" else list[str] if one.repeats else str
    if words:
        return StrEnum(name, {word: word for word in words})
    plain = next(iter(kinds.values()))
    return next(kind for kind in get_args(plain) or (plain,) if kind is not NoneType)
