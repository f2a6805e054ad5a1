"""Plans and comparisons beside those kept in `plans/`, section by section.

Golden records are written anew, whole or a section alone, by this command in the root of the repository, which says
what it changes: `python -m tests.golden.write [CASE...] [--section SECTION...]`
"""

import contextlib
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError
from moeplan.planner.report.plan import solve_report
from tests.golden.cases import COMPARES, SOLVES
from tests.golden.record import SECTIONS, SHOWN, differences, load
from tests.golden.screens import FOLDER, SCREENS, screen
from tests.golden.workshop import Workshop
from tests.planner import makers

CASES = [*SOLVES, *COMPARES]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with Workshop.opened(tmp_path_factory.mktemp("golden")) as opened:
        yield opened


@pytest.mark.parametrize(
    ("case", "section"),
    [(case, name) for case in CASES for name in SECTIONS if case in SOLVES or name not in ("decisions", "outcome")],
)
def test_a_section_is_as_it_was(workshop: Workshop, case: str, section: str) -> None:
    """Figures of contenders and metrics that both have; then which those are."""
    golden, found, shared = load(case), workshop.record(case), section == "evaluation"
    if lines := [*islice(differences(golden[section], found[section], section, shared=shared), SHOWN)]:
        pytest.fail("\n".join(lines), pytrace=False)
    assert not shared or metrics_of(found) == metrics_of(golden)


@pytest.mark.parametrize("case", SOLVES)
def test_plan_certifies(workshop: Workshop, case: str) -> None:
    assert workshop.certified(case).checks


@pytest.mark.parametrize("name", SCREENS)
def test_screen(workshop: Workshop, name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    assert screen(workshop, name).split("\n") == text.split("\n")
    _, *parts = re.split(r"^\[(\d+) columns\]$", text, flags=re.MULTILINE)
    for width, lines in zip(parts[::2], parts[1::2], strict=True):
        assert max(map(len, lines.split("\n"))) <= int(width)


@pytest.mark.parametrize("kept", [False, True])
def test_a_plan_that_does_not_replace_the_one_in_force_is_not_to_be_applied(workshop: Workshop, kept: bool) -> None:
    plan = workshop.plan("exflow-replan")
    replanned = plan.options["placement"]["replanned"]
    verdict = replanned["verdict"] | {"value": "none" if kept else "benefit"}
    options = {"placement": {**plan.options["placement"], "replanned": {**replanned, "verdict": verdict}}}
    told = makers.screen(
        solve_report, plan.model_copy(update={"options": {**plan.options, **options}}), Path("next.json"), width=80
    )
    assert ("keep the plan in force" in told) == kept
    assert ("next: moeplan apply" in told) != kept


@pytest.mark.parametrize("case", SOLVES)
def test_figures_that_were_set_to_0_are_a_screen_or_one_line(workshop: Workshop, case: str) -> None:
    plan = workshop.plan(case)
    assert plan.evaluation is not None
    for name in {name for one in plan.evaluation.judging.contenders for name in one.metrics}:
        forged = makers.parsed(with_0(plan.model_dump(mode="json"), name))
        with contextlib.suppress(InputError):
            makers.screen(solve_report, forged, Path("plan.json"), verbose=True)


def with_0(value: Any, name: str) -> Any:
    """JSON in which every metric of that name is 0."""
    if isinstance(value, list):
        return [with_0(one, name) for one in value]
    if not isinstance(value, dict):
        return value
    nothing = {"value": 0.0, "low": None, "high": None}
    of_name = {dict: nothing, float: 0.0}
    return {key: of_name.get(type(one), one) if key == name else with_0(one, name) for key, one in value.items()}


def metrics_of(record: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Part, label and metrics of every contender, in order."""
    parts = {name: (part or {}).get("contenders", {}) for name, part in record["evaluation"].items()}
    return [(name, label, sorted(metrics)) for name, part in parts.items() for label, metrics in part.items()]
