"""The commands there are. A module is imported when its command is called."""

from collections.abc import Mapping
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

COMMANDS = {
    "profile": "Measure this machine, or describe a cluster.",
    "trace": "Record, import, inspect and count routing.",
    "solve": "Compute a plan from a trace.",
    "show": "Print a plan, or draw a layer of it.",
    "report": "Write a plan as a page to show.",
    "compare": "Compare plans on any trace.",
    "certify": "Recompute what a plan claims.",
    "replay": "Run plans on real ranks with recorded routing.",
    "apply": "Make a plan active, or write it for an engine.",
    "validate": "Check a file that places experts by its engine's rules.",
    "demo": "Run the whole chain on the embedded model.",
}


class PanelCommand(TyperCommand):
    """A command whose options of one panel stand together in its help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options without a panel first, then a section for each panel.

        A callback's `rows` are further lines of a panel.
        """
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                usual = f"{parameter.param_type_name.capitalize()}s"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        rows = getattr(self.callback, "rows", {})
        panels |= {title: [*rows[title], *panels.pop(title, ())] for title in rows}
        for title, records in ((title, records) for title, records in panels.items() if records):
            with formatter.section(title):
                formatter.write_dl(records)


class LazyGroup(TyperGroup):
    """A group known by its commands' one-line helps, in the order shown.

    A command is the function, or the group, of its name in its module of `planner/cli`: what `modules` says, else the
    one of its name.
    """

    def __init__(self, name: str, helps: Mapping[str, str], modules: Mapping[str, str], **settings: Any) -> None:
        listed = {command: TyperCommand(command, help=line, rich_markup_mode=None) for command, line in helps.items()}
        super().__init__(name=name, commands=dict(listed), rich_markup_mode=None, no_args_is_help=True, **settings)
        self.modules = modules

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command, imported now."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.load(name) if name is not None and name in self.commands else command, rest

    def load(self, name: str) -> Any:
        """Import the command `name`."""
        module = import_module(f".{self.modules.get(name, name)}", __package__)
        command = getattr(module, f"{name}_" if iskeyword(name) else name)
        if isinstance(command, LazyGroup):
            return command
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.command(name, cls=PanelCommand)(command)
        return get_command(app)


def _tell_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"moeplan {version('moeplan')}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


_app = typer.Typer(add_completion=False)
_app.callback()(_root)
group = LazyGroup(
    "moeplan",
    COMMANDS,
    dict.fromkeys(("show", "compare", "certify", "validate"), "plans"),
    params=get_command(_app).params,
    help="Plan Mixture-of-Experts expert parallelism: measure, record, solve, apply.\n\n"
    "In an empty directory, one after another: moeplan profile; moeplan solve; moeplan apply plan.json.",
)
