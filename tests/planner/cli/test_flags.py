import inspect
from dataclasses import asdict, dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from moeplan.planner.cli.flags import grouped
from moeplan.planner.cli.solve import solve
from moeplan.planner.cli.solve_flags import Balance, Fit, Pipeline, Replan, Search, Slots, Solver, Where
from moeplan.planner.request import Request


@dataclass(frozen=True)
class Pair:
    """Two flags."""

    first: Annotated[int, typer.Option(help="A number.")] = 1
    second: Annotated[bool, typer.Option("--second")] = False


def test_a_group_becomes_one_flag_a_field_in_its_place() -> None:
    app, got = typer.Typer(), []

    @app.command()
    @grouped
    def command(before: str = "x", pair: Pair = Pair(), after: float = 0.5) -> None:
        got.append((before, pair, after))

    assert CliRunner().invoke(app, ["--after", "2", "--first", "7", "--second"]).exit_code == 0
    assert got == [("x", Pair(7, True), 2.0)]
    assert CliRunner().invoke(app, ["--first", "many"]).exit_code == 2
    assert CliRunner().invoke(app, ["--pair", "1"]).exit_code == 2


def test_the_flags_of_solve_are_all_that_its_groups_hold() -> None:
    flags = [*inspect.signature(solve).parameters]
    groups = (Where, Solver, Search, Slots, Balance, Replan, Pipeline, Fit)
    held = [name for group in groups for name in inspect.signature(group).parameters]
    assert flags == [*held, "learning_curve", "output", "as_json"]


@pytest.mark.parametrize("group", [Slots, Balance, Pipeline])
def test_a_strategys_flags_are_fields_of_a_request_with_the_same_default(group: type) -> None:
    request = inspect.signature(Request).parameters
    given = group()
    chosen = given.chosen() if hasattr(given, "chosen") else asdict(given)
    assert chosen == {name: request[name].default for name in chosen}
