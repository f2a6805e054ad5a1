"""Saved results and the pages made from them."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.growth import curves
from benchmarks.report import index, page, show
from benchmarks.result import Environment, Result, Section, load, save
from benchmarks.study import DEFAULT, SUBJECTS, Row

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
SAVED = [name for name in SUBJECTS if (DOCS / f"{name}.json").exists()]
ENVIRONMENT = Environment(
    cpu="a cpu", cores=2, python="3", packages={"numpy": "2"}, commit="0", date="d", load_at_start=1, load_at_end=2
)
ROW = Row("I=8", "own", quality=0.5, bound=0.25, seconds=2e-3, least_s=1e-3, ratio=123.4, more={"lost, %": 0.1})
SECTION = Section(title="A title", quality="saved, %", baseline="km", note="A note.", rows=[ROW])
RESULT = Result(
    schema_version=1, subject="made", about="About", form="quick", environment=ENVIRONMENT, sections=[SECTION]
)


def test_every_strategy_has_saved_results() -> None:
    assert set(DEFAULT) <= set(SAVED)


@pytest.mark.parametrize("name", SAVED)
def test_the_page_is_the_one_that_the_results_give(name: str) -> None:
    result = load(DOCS / f"{name}.json")
    picture = DOCS / f"{name}.svg"
    assert result.subject == name
    assert (DOCS / f"{name}.md").read_text() == page(result)
    assert picture.exists() == bool(curves(result))
    assert not picture.exists() or picture.stat().st_size < 100_000


def test_the_index_is_the_one_that_the_results_give() -> None:
    assert (DOCS / "README.md").read_text() == index([load(DOCS / f"{name}.json") for name in SAVED])


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    save(RESULT, tmp_path / "made.json")
    assert load(tmp_path / "made.json") == RESULT


def test_a_page_holds_every_figure_in_its_unit() -> None:
    assert "| I=8 | own | 50.0% | 25.0% | 2.00 ms | 123 | 10.0% |" in page(RESULT)  # no column without a figure
    assert "Baseline: km." in page(RESULT)
    assert "benchmarks made --quick --save" in page(RESULT)


def test_a_skipped_section_says_so_on_page_and_screen(capsys: pytest.CaptureFixture[str]) -> None:
    skipped = replace(RESULT, sections=[replace(SECTION, skipped="no data", rows=[])])
    show(skipped)
    assert "**Skipped**: no data." in page(skipped)
    assert "SKIPPED: no data" in capsys.readouterr().out


def test_the_table_is_at_most_100_columns_wide(capsys: pytest.CaptureFixture[str]) -> None:
    long = replace(ROW, instance="an instance of a long name " * 4, method="a_method_of_one_long_word")
    show(replace(RESULT, sections=[replace(SECTION, rows=[ROW, long])]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any("50.0%" in line and "25.0%" in line and "123" in line for line in lines)


def test_further_figures_stand_in_words_on_a_line_below_their_row(capsys: pytest.CaptureFixture[str]) -> None:
    more = {"gain over stay, %": 0.428, "volume, MB": 28.77, "budget, s": 3.69e-3, "sizes": 7.0}
    show(replace(RESULT, sections=[replace(SECTION, rows=[replace(ROW, more=more), ROW])]))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    at = lines.index("gain over stay 42.8%, volume 28.77 MB, budget 3.69 ms, sizes 7")
    assert lines[at - 1].startswith("I=8")
    assert lines[at + 1].startswith("own")
