"""Plans and comparisons beside those kept in `plans/`, section by section.

Golden records are written anew, whole or a section alone, by this command in the root of the repository, which says
what it changes: `python -m tests.golden.write [CASE...] [--section SECTION...]`
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from moeplan.planner.cli.screen import HangingConsole
from moeplan.planner.report.plan import solve_report
from tests.golden.cases import COMPARES, SOLVES
from tests.golden.record import SHOWN, differences, load
from tests.golden.screens import FOLDER, SCREENS, screen
from tests.golden.workshop import Workshop

CASES = [*SOLVES, *COMPARES]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with Workshop.opened(tmp_path_factory.mktemp("golden")) as opened:
        yield opened


def check(workshop: Workshop, case: str, section: str, *, shared: bool = False) -> None:
    """Hold a section of a case against its golden record, in the keys that both have where only these are `shared`."""
    golden, found = load(case)[section], workshop.record(case)[section]
    if lines := [*islice(differences(golden, found, section, shared=shared), SHOWN)]:
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.parametrize("case", SOLVES)
def test_decisions(workshop: Workshop, case: str) -> None:
    check(workshop, case, "decisions")


@pytest.mark.parametrize("case", SOLVES)
def test_outcome(workshop: Workshop, case: str) -> None:
    check(workshop, case, "outcome")


@pytest.mark.parametrize("case", CASES)
def test_evaluation(workshop: Workshop, case: str) -> None:
    """Of contenders and metrics that both have; `test_contenders` tells of the others."""
    check(workshop, case, "evaluation", shared=True)


@pytest.mark.parametrize("case", CASES)
def test_contenders(workshop: Workshop, case: str) -> None:
    assert metrics_of(workshop.record(case)) == metrics_of(load(case))


@pytest.mark.parametrize("case", CASES)
def test_options(workshop: Workshop, case: str) -> None:
    check(workshop, case, "options")


@pytest.mark.parametrize("case", CASES)
def test_verdict(workshop: Workshop, case: str) -> None:
    check(workshop, case, "verdict")


@pytest.mark.parametrize("case", SOLVES)
def test_plan_certifies(workshop: Workshop, case: str) -> None:
    assert workshop.certified(case).checks


@pytest.mark.parametrize("name", SCREENS)
def test_screen(workshop: Workshop, name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    assert screen(workshop, name).split("\n") == text.split("\n")
    for line, width in columns_of(text):
        assert len(line) <= width


@pytest.mark.parametrize("kept", [False, True])
def test_a_plan_that_does_not_replace_the_one_in_force_is_not_to_be_applied(workshop: Workshop, kept: bool) -> None:
    plan = workshop.plan("exflow-replan")
    replanned = plan.options["placement"]["replanned"]
    verdict = replanned["verdict"] | {"value": "none" if kept else "benefit"}
    options = {"placement": {**plan.options["placement"], "replanned": {**replanned, "verdict": verdict}}}
    console = HangingConsole(80)
    with console.capture() as captured:
        solve_report(plan.model_copy(update={"options": {**plan.options, **options}}), Path("next.json"), console)
    assert ("keep the plan in force" in captured.get()) == kept
    assert ("next: moeplan apply" in captured.get()) != kept


def columns_of(text: str) -> Iterator[tuple[str, int]]:
    """Every line of a kept screen with the width it was made for."""
    width = 0
    for line in text.split("\n"):
        if line.startswith("[") and line.endswith(" columns]"):
            width = int(line[1:].split()[0])
        else:
            yield line, width


def metrics_of(record: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Part, label and metrics of every contender, in order."""
    parts = {name: (part or {}).get("contenders", {}) for name, part in record["evaluation"].items()}
    return [(name, label, sorted(metrics)) for name, part in parts.items() for label, metrics in part.items()]
