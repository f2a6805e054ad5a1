"""Groups of flags: those of one strategy stand together in a dataclass, and a command takes the dataclass."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

__all__ = ["grouped"]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is a dataclass spread into one flag a field, in its place.

    A field is annotated as a parameter would be, `Annotated[type, typer.Option(...)]`, and has a default.
    """
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hints[name] for name in signature.parameters if dataclasses.is_dataclass(hints[name])}
    spread: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        spread += _flags(groups[name]) if name in groups else [parameter]

    @functools.wraps(command)
    def with_flags(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    with_flags.__signature__ = signature.replace(parameters=spread)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in spread}
    return with_flags


def _flags(group: type) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]
