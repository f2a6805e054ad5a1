"""Command groups that import a command only when it is called."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["LazyGroup"]


class LazyGroup(TyperGroup):
    """A group known by its one-line helps; each command's module is `planner/cli/{module}.py`.

    Parameters
    ----------
    helps
        Command name to its one-line help, in the order shown.
    prefix
        What a module name has before the command's name.
    """

    def __init__(self, name: str, helps: Mapping[str, str], *, prefix: str = "", **settings: Any) -> None:
        listed = {command: TyperCommand(command, help=line, rich_markup_mode=None) for command, line in helps.items()}
        super().__init__(name=name, commands=dict(listed), rich_markup_mode=None, no_args_is_help=True, **settings)
        self.prefix = prefix

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command, imported now."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.load(name) if name is not None and name in self.commands else command, rest

    def load(self, name: str) -> Any:
        """Import the command `name`."""
        from typer.main import get_command

        module = import_module(f".{self.prefix}{name}", __package__)
        if hasattr(module, "group"):
            return module.group
        command = get_command(module.app)
        command.name = name
        return command
