"""Flags of `moeplan solve`, which follow from the parameters of strategies: help, panels, values, refusals."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from moeplan.errors import UsageError
from moeplan.planner.cli.commands import COMMANDS, PanelCommand, group
from moeplan.planner.cli.solve import solve
from moeplan.planner.cli.trace import COMMANDS as TRACE_COMMANDS
from moeplan.planner.compare import Comparison
from moeplan.planner.evaluate.step_size import StepSize
from moeplan.planner.params import Flag, choices, flags_of, option_of
from moeplan.planner.request import Dispatch, Phase, ReplayRule, Request
from moeplan.planner.strategies.registry import STRATEGIES, strategy
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.decisions import DISPATCH_MODELS
from moeplan.solvers import replicas
from moeplan.solvers.netmoe import METHODS
from moeplan.traces.schema import PHASES

FLAGS = [(name, field, one) for name, row in STRATEGIES.items() for field, one in flags_of(row.params)]
NAMED = [f"{name} --{field}" for name, field, _ in FLAGS]
TEXTS: dict[str, tuple[str, Any]] = {
    "redundant": ("4", 4),
    "dead": ("1", (1,)),
    "pins": ("3@1", ((3, 1),)),
    "condense_schedule": ("0.5", 0.5),
    "condense_history": ("0.8:0.2", (0.8, 0.2)),
}
BESIDE = {"backend": ("--method", "ilp")}  # without which a flag makes no sense


app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command(cls=PanelCommand)(solve)


class Asked(Exception):  # noqa: N818  what a request is caught by
    """A request that was about to be met."""


@pytest.fixture(autouse=True)
def catching(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make(request: Request, **_: Any) -> None:
        raise Asked(request)

    monkeypatch.setattr("moeplan.planner.solve.make", make)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def anything_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces, profiles and plans that a request names are taken for there; what has no cluster has one of 2x2."""
    monkeypatch.setattr("moeplan.traces.dataset.form_of", lambda _: "tokens")
    monkeypatch.setattr("moeplan.planner.request.profile_for", lambda path: path)
    monkeypatch.setattr("moeplan.planner.request.cluster_for", lambda asked, *_, **__: Cluster.parse(asked or "2x2"))


def requested(*args: str, by: str = "eplb") -> Request:
    """What `moeplan solve` asks for by a strategy, for a cluster; its refusals are raised."""
    return asked_for("--strategy", by, "--cluster", "2x2", *args)


def asked_for(*args: str) -> Request:
    """What `moeplan solve` asks for; its refusals are raised."""
    result = CliRunner().invoke(app, args)
    if isinstance(result.exception, Asked):
        return result.exception.args[0]  # type: ignore[no-any-return]
    assert result.exception is not None
    raise result.exception


def values_of(hint: Any, one: Flag) -> tuple[list[str], Any]:
    """A value that a flag takes, as it is written and as it arrives."""
    if words := choices(hint):
        return [words[-1]], words[-1]
    kind = next((kind for kind in get_args(hint) if kind is not type(None)), hint)
    if kind is bool:
        return [], True
    if kind in (str, Path):
        return ["some"], kind("some")
    number = kind((one.at_least or one.above or 0) + 1)
    number = number if one.at_most is None or number <= one.at_most else kind(one.at_most)
    return [str(number)], number


def written(name: str, field: str, one: Flag) -> tuple[list[str], Any]:
    hint = get_type_hints(STRATEGIES[name].params)[field]
    text, value = ([TEXTS[field][0]], TEXTS[field][1]) if one.parse else values_of(hint, one)
    return [option_of(field, one), *text], value


def panels() -> Iterator[tuple[str, str]]:
    """The title of every panel of the help, and its text."""
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    yield from re.findall(r"^(\w+(?: \w+)*):\n((?: .*\n?)+)", shown, re.MULTILINE)


def test_every_flag_stands_once_in_help_in_its_strategys_panel_or_in_that_of_several_naming_them() -> None:
    owners: dict[str, list[str]] = {}
    for name, field, one in FLAGS:
        owners.setdefault(option_of(field, one), []).append(name)
    texts = dict(panels())
    several = re.findall(r"^  (--[\w-]+) (?:\S+) +([\w, ]+): ", texts.pop("several strategies"), re.MULTILINE)
    shown = [(option, names.split(", ")) for option, names in several]
    del texts["Options"]
    for title, text in texts.items():
        flags = re.findall(r"^  (--(?!method )[\w-]+)", text, re.MULTILINE)
        shown += [(option, [title]) for option in flags]
    assert dict(shown) == owners
    assert len(shown) == len(owners)


def test_every_method_is_explained_in_one_line_of_its_strategys_panel_the_default_named() -> None:
    texts = dict(panels())
    for name, row in STRATEGIES.items():
        lines = re.findall(r"^  --method (\w+) +(\w.+)$", texts.get(name, ""), re.MULTILINE)
        assert tuple(word for word, _ in lines) == choices(get_type_hints(row.params).get("method"))
        assert len({meaning for _, meaning in lines}) == len(lines)
        told = [word for word, meaning in lines if meaning.endswith("[default]")]
        assert told == [word for word in [getattr(row.params(), "method", None)] if word]


def test_no_line_of_help_is_wider_than_80_columns_in_a_terminal_of_80() -> None:
    commands = {name: group.load(name) for name in COMMANDS}
    commands |= {f"trace {name}": commands["trace"].load(name) for name in TRACE_COMMANDS}
    for name, command in commands.items():
        context = command.make_context(f"moeplan {name}", [], resilient_parsing=True, terminal_width=80)
        assert not [line for line in command.get_help(context).splitlines() if len(line) > 80], name


@pytest.mark.parametrize(("name", "field", "one"), FLAGS, ids=NAMED)
def test_a_flag_becomes_the_parameter_of_its_name_and_no_other(
    name: str, field: str, one: Flag, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(STRATEGIES[name].params, "check", lambda *_: None)  # whether it goes with others
    args, value = written(name, field, one)
    params, plain = requested(*BESIDE.get(field, ()), *args, by=name).params, STRATEGIES[name].params()
    assert getattr(params, field) == value
    others = {other for _, other, _ in FLAGS if hasattr(plain, other)} - {field, "method" if field in BESIDE else field}
    assert all(getattr(params, other) == getattr(plain, other) for other in others)


@pytest.mark.parametrize(("name", "field", "one"), FLAGS, ids=NAMED)
def test_a_flag_of_another_strategy_is_refused_by_one_sentence(name: str, field: str, one: Flag) -> None:
    owners = " and ".join(owner for owner, known, _ in FLAGS if known == field)
    for other, row in STRATEGIES.items():
        if field not in dict(flags_of(row.params)):
            with pytest.raises(UsageError) as refused:
                requested(*written(name, field, one)[0], by=other)
            told = str(refused.value)
            assert told.startswith(f"{option_of(field, one)} with --strategy {other}; it is a flag of {owners}: ")
            mend = "leave out --strategy" if "auto" in owners else f"give --strategy {owners.replace(' and ', ' or ')}"
            assert told.endswith(f": {mend}")


@pytest.mark.parametrize(("name", "field", "one"), FLAGS, ids=NAMED)
def test_a_number_out_of_bounds_and_a_word_that_is_none_are_refused(name: str, field: str, one: Flag) -> None:
    hint, option = get_type_hints(STRATEGIES[name].params)[field], option_of(field, one)
    bounds = [one.at_least is not None and one.at_least - 1, one.above, one.at_most is not None and one.at_most * 2]
    for wrong in (bound for bound in bounds if bound is not None and bound is not False):
        with pytest.raises(UsageError) as refused:
            requested(option, f"{wrong:g}" if int in get_args(hint) else str(float(wrong)), by=name)
        assert str(refused.value).startswith(f"{option} ")
        assert f"expected {one.expected}" in str(refused.value)
    if choices(hint) and not one.parse:
        with pytest.raises(SystemExit):
            requested(option, "magic", by=name)


@pytest.mark.parametrize("text", ["3", "@", "3@", "@3", "a@1", "-1@2", "1@2@3", "1@²", "1" * 5000 + "@0"])
def test_a_pin_is_an_expert_at_a_device(text: str) -> None:
    with pytest.raises(UsageError, match="expected EXPERT@DEVICE"):
        requested("--pin", text)


def test_pins_and_dead_devices_are_sorted_and_each_once_and_slots_are_numbers_or_auto() -> None:
    asked: Any = requested(
        "--pin", "3@1", "--pin", "12@0", "--pin", "3@1", "--dead", "3", "--dead", "2", "--dead", "3"
    ).params
    assert (asked.pins, asked.dead) == (((3, 1), (12, 0)), (2, 3))
    assert requested("--redundant", "auto").params.redundant == "auto"  # type: ignore[attr-defined]
    for wrong in ("many", "9" * 5000):
        with pytest.raises(UsageError, match="a number of slots, or auto"):
            requested("--redundant", wrong)


@pytest.mark.parametrize(
    ("given", "mixture"),
    [
        ([], ()),
        (["a:b"], ()),
        (["run-12:30"], ()),
        (["run-12:30:2"], (("run-12:30", 2.0),)),
        (["a:0.7", "b:0.3"], (("a", 0.7), ("b", 0.3))),
        (["a", "b"], (("a", 1.0), ("b", 1.0))),
        (["s3://bucket/a", "s3://bucket/b:2"], (("s3://bucket/a", 1.0), ("s3://bucket/b", 2.0))),
    ],
)
@pytest.mark.usefixtures("anything_is_there")
def test_a_weight_follows_the_last_colon_unless_that_is_a_traces_name(given: list[str], mixture: Any) -> None:
    Path("run-12:30").mkdir()
    asked = requested(*(word for path in given for word in ("--trace", path)))
    assert asked.mixture == mixture
    assert asked.trace == (mixture[0][0] if mixture else (given or ["traces"])[0])


@pytest.mark.usefixtures("anything_is_there")
@pytest.mark.parametrize("example", re.findall(r"^ +moeplan solve (.+)$", solve.__doc__ or "", re.MULTILINE))
def test_every_example_of_the_help_is_a_request(example: str) -> None:
    assert asked_for(*example.split()).cluster.num_devices > 1


@pytest.mark.usefixtures("anything_is_there")
def test_what_compare_advises_for_a_plan_that_no_longer_pays_is_a_request() -> None:
    verdict = SimpleNamespace(value="none", gain=SimpleNamespace(low=-1.0))
    source = SimpleNamespace(sha256="a" * 64)
    options = {"auto": {"engine": "sglang"}}
    plan = SimpleNamespace(strategies=("exflow",), inputs=SimpleNamespace(trace=source), options=options)
    size = StepSize("tokens", 8)
    one = SimpleNamespace(
        path="plan.json", plan=plan, paid_when_solved=True, verdict=verdict, size_when_solved=StepSize("tokens", 4)
    )
    kind: Any = Comparison
    comparison = SimpleNamespace(
        compared=[one], failing=["plan.json"], trace="new", trace_sha256="b" * 64, size=size, profile="p.json"
    )
    options.clear()
    comparison.fills = True
    again: Any = asked_for(*kind.again.fget(comparison).removeprefix("moeplan solve ").split())
    assert (again.waterfill, again.params.engine) == (True, "sglang")
    comparison.fills = False
    options["auto"] = {"engine": "sglang"}
    comparison.again = kind.again.fget(comparison)
    anew = "moeplan solve --trace new --profile p.json --engine sglang --tokens-per-step 8"
    assert kind.advice.fget(comparison) == f"solve for this step size: {anew}"
    assert asked_for(*anew.removeprefix("moeplan solve ").split()).size == size
    one.size_when_solved = size
    advice = kind.advice.fget(comparison)
    request = asked_for(*advice.removeprefix("re-plan: moeplan solve ").split())
    assert (request.previous, request.trace) == (Path("plan.json"), "new")
    comparison.trace_sha256 = source.sha256
    assert kind.advice.fget(comparison) == "it was solved on this very trace: record more, or keep what runs today"


def test_the_words_a_user_may_choose_from_are_those_the_planner_knows() -> None:
    assert get_args(get_type_hints(solve)["strategy"]) == tuple(STRATEGIES)
    assert set(get_args(Dispatch)) == {model for name in STRATEGIES for model in strategy(name).dispatch_models}
    assert get_args(Dispatch) == DISPATCH_MODELS
    assert get_args(Phase) == PHASES
    assert get_args(ReplayRule) == get_args(replicas.ReplayRule)
    assert set(choices(get_type_hints(STRATEGIES["netmoe"].params)["method"])) == set(METHODS)
