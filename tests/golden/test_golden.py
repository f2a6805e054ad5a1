"""Plans and comparisons beside those kept in `plans/`, section by section.

A golden record is written anew, all of it or a section alone, by

    python -m tests.golden.write [CASE...] [--section SECTION...]

from the root of the repository; it says what it changes.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from tests.golden.cases import COMPARES, SOLVES
from tests.golden.record import differences, load
from tests.golden.workshop import Workshop

CASES = [*SOLVES, *COMPARES]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with Workshop.opened(tmp_path_factory.mktemp("golden")) as opened:
        yield opened


def check(workshop: Workshop, case: str, section: str, *, shared: bool = False) -> None:
    """Hold a section of a case against its golden record."""
    golden, found = load(case).get(section), workshop.record(case).get(section)
    assert golden is not None, f"no golden {section} of {case}"
    same([*islice(differences(golden, found, section, shared=shared), 12)])


def same(different: list[str]) -> None:
    if different:
        pytest.fail("\n".join(different), pytrace=False)


@pytest.mark.parametrize("case", SOLVES)
def test_decisions(workshop: Workshop, case: str) -> None:
    check(workshop, case, "decisions")


@pytest.mark.parametrize("case", SOLVES)
def test_outcome(workshop: Workshop, case: str) -> None:
    check(workshop, case, "outcome")


@pytest.mark.parametrize("case", CASES)
def test_evaluation(workshop: Workshop, case: str) -> None:
    """Contenders and metrics that both have; those of only one are told by `test_contenders`."""
    check(workshop, case, "evaluation", shared=True)


@pytest.mark.parametrize("case", CASES)
def test_contenders(workshop: Workshop, case: str) -> None:
    golden, found = (_metrics(one["evaluation"]) for one in (load(case), workshop.record(case)))
    assert [*golden.items()] == [*found.items()]


@pytest.mark.parametrize("case", CASES)
def test_options(workshop: Workshop, case: str) -> None:
    check(workshop, case, "options")


@pytest.mark.parametrize("case", CASES)
def test_verdict(workshop: Workshop, case: str) -> None:
    check(workshop, case, "verdict")


@pytest.mark.parametrize("case", SOLVES)
def test_plan_certifies(workshop: Workshop, case: str) -> None:
    assert workshop.certified(case).checks


def _metrics(evaluation: dict[str, Any]) -> dict[str, list[str]]:
    """The metrics of every contender by its part and label, in their order."""
    parts = {name: part["contenders"] for name, part in evaluation.items() if part and "contenders" in part}
    return {f"{name} {label}": [*metrics] for name, part in parts.items() for label, metrics in part.items()}
