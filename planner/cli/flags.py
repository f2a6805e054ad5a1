"""Flags that commands share, and those of `moeplan solve` that are fields of the strategies' parameters."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import wraps
from types import GenericAlias, NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from ..params import Flag, Params, choices, flags_of, option_of
from ..request import Phase
from ..strategies.auto import AutoParams
from ..strategies.registry import STRATEGIES

StrategyFlags = dict[str, Any]
SEVERAL = "several strategies"  # panel of the flags that more than one strategy has
ENGINES = ", ".join(choices(get_type_hints(AutoParams)["engine"]))


def optional(help: str, *names: str, **settings: Any) -> Any:  # noqa: A002  what typer calls it
    """An option without a default to show; `settings` as of `typer.Option`."""
    return typer.Option(*names, help=help, show_default=False, **settings)


Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print all figures, bounds and details.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
# typer takes lists of words from an enum only.
PhaseWord = StrEnum("PhaseWord", {word: word for word in get_args(Phase)})  # type: ignore[misc]  # mypy reads literals
Phases = Annotated[list[PhaseWord] | None, optional("Only tokens of this phase; may repeat.")]
Purpose = Annotated[
    Literal["serving", "training"] | None, optional("Use of the plan; else by the trace's phases.", "--for")
]
TokensPerStep = Annotated[
    int | None, optional("Tokens per step; by default 4,096 per device (prefill) or 8,192 (training).")
]
Concurrency = Annotated[int | None, optional("Decode: sequences that run at once; by default 64 per device.")]
SamplesPerStep = Annotated[int | None, optional("Prefill, training: instead of tokens.")]

Waterfill = Annotated[
    bool, typer.Option("--waterfill", help="SGLang: shared experts are load, where its waterfill puts them.")
]


WORKERS = "Where tasks run: auto (processes of this machine), a number of them, ray, ray://HEAD:PORT, dask://HOST:PORT."
WorkersText = Annotated[str, typer.Option("--workers", help=WORKERS, metavar="WORKERS")]


def phases(words: list[PhaseWord] | None) -> tuple[Any, ...]:
    """Phases as the planner has them."""
    return tuple(word.value for word in words or ())


def with_strategy_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Spread a command's parameter `flags`, fields by name, into a flag for each field that any strategy has."""
    signature, derived = inspect.signature(command), _derived()

    @wraps(command)
    def with_flags(**given: Any) -> None:
        """Call the command with the flags that were set."""
        flags = {}
        for name, (one, _) in derived.items():
            value = given.pop(name)
            if value is not None and value is not False and value != []:  # 0 was said, and equals False
                flags[name] = value if one.parse is None else one.parse(value)
        command(**given, flags=flags)

    hints = get_type_hints(command, include_extras=True)
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in signature.parameters.items()
        if name != "flags"
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, (_, annotation) in derived.items()
    ]
    with_flags.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_flags.rows = {name: _methods(row.params) for name, row in STRATEGIES.items()}  # type: ignore[attr-defined]
    return with_flags


def _derived() -> dict[str, tuple[Flag, Any]]:
    """Every field that is a flag, with its annotation for typer; those of most strategies come first."""
    fields: dict[str, dict[str, tuple[Any, Any, Flag]]] = {}
    for strategy, row in STRATEGIES.items():
        hints, own = get_type_hints(row.params), {one.name: one for one in dataclasses.fields(row.params)}
        for name, one in flags_of(row.params):
            fields.setdefault(name, {})[strategy] = hints[name], own[name].default, one
    derived = {}
    for name, owners in sorted(fields.items(), key=lambda item: -len(item[1])):
        kinds, (default, *others), (one, *_) = zip(*owners.values(), strict=True)
        silent = others or default in (None, (), False, 0)
        words = one.help if silent else f"{one.help}  [default: {default}]"
        words = f"{', '.join(owners)}: {words}" if others else words
        panel = SEVERAL if others else next(iter(owners))
        metavar = one.metavar or (name.upper() if len({*map(choices, kinds)}) > 1 else None)
        option = optional(words, option_of(name, one), metavar=metavar, rich_help_panel=panel)
        derived[name] = one, Annotated[_typed(kinds, one) | None, option]
    return derived


def _methods(params: type[Params]) -> list[tuple[str, str]]:
    """A row of the help for each method of a strategy, the default's named."""
    words = choices(get_type_hints(params).get("method"))
    default = next((one.default for one in dataclasses.fields(params) if one.name == "method"), None)
    return [(f"--method {word}", params.methods.get(word, "") + "  [default]" * (word == default)) for word in words]


def _typed(kinds: Sequence[Any], one: Flag) -> Any:
    """Type of a flag for typer: all strategies' choices, text to be parsed later, or the field's type."""
    words = tuple(dict.fromkeys(word for kind in kinds for word in choices(kind)))
    if one.parse is not None:
        return GenericAlias(list, one.kind) if one.repeats else one.kind
    if words:
        return Literal[words]
    return next(kind for kind in get_args(kinds[0]) or (kinds[0],) if kind is not NoneType)
