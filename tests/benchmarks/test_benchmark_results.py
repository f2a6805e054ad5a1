"""Subjects and their saved results: figures, pages, pictures, commits, and the harness that takes time and memory."""

import gc
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.__main__ as driver
from benchmarks.growth import FITTED, curves, draw
from benchmarks.race import peak_bytes, race
from benchmarks.report import index, page, page_name, show
from benchmarks.result import SAVED, Environment, Result, Section, commit, load, refuse_changes, save
from benchmarks.study import DEFAULT, SUBJECTS, Row, Settings, Study, studies
from moeplan.errors import UsageError
from tests.builders import known

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
SUBJECTS_SAVED = [name for name in SUBJECTS if (DOCS / f"{name}.json").exists()]
ENVIRONMENT = Environment(
    cpu="a cpu", cores=2, python="3", packages={"numpy": "2"}, commit="0", date="d", load_at_start=1, load_at_end=2
)
ROW = Row("I=8", "own", quality=0.5, bound=0.25, seconds=2e-3, least_s=1e-3, ratio=123.4, more={"lost, %": 0.1})
SECTION = Section(title="A title", quality="saved, %", baseline="km", note="A note.", rows=[ROW])
RESULT = Result(
    schema_version=1, subject="made", about="About", form="quick", environment=ENVIRONMENT, sections=[SECTION]
)


@pytest.mark.parametrize("name", SUBJECTS_SAVED)
def test_the_page_is_the_one_that_the_results_give(name: str) -> None:
    result = load(DOCS / f"{name}.json")
    picture = DOCS / f"{name}.svg"
    assert result.subject == name
    assert (DOCS / page_name(name)).read_text() == page(result)
    assert picture.exists() == bool(curves(result))
    assert not picture.exists() or picture.stat().st_size < 100_000


def test_the_index_is_the_one_that_the_results_of_every_strategy_give() -> None:
    assert set(DEFAULT) <= set(SUBJECTS_SAVED)
    assert (DOCS / "README.md").read_text() == index([load(DOCS / f"{name}.json") for name in SUBJECTS_SAVED])


def test_what_was_saved_is_loaded_and_its_page_holds_every_figure_in_its_unit(tmp_path: Path) -> None:
    save(RESULT, tmp_path / "made.json")
    assert load(tmp_path / "made.json") == RESULT
    assert "| I=8 | own | 50.0 % | 25.0 % | 2.00 ms | 123 | 10.0 % |" in page(RESULT)  # no column without a figure
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
    assert any("50.0 %" in line and "25.0 %" in line and "123" in line for line in lines)


def test_further_figures_stand_in_words_on_a_line_below_their_row(capsys: pytest.CaptureFixture[str]) -> None:
    more = {"gain over stay, %": 0.428, "volume, MB": 28.77, "budget, s": 3.69e-3, "sizes": 7.0}
    show(replace(RESULT, sections=[replace(SECTION, rows=[replace(ROW, more=more), ROW])]))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    at = lines.index("gain over stay 42.8 %, volume 28.77 MB, budget 3.69 ms, sizes 7")
    assert lines[at - 1].startswith("I=8")
    assert lines[at + 1].startswith("own")


IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@example.org")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one commit: a module and a saved result."""
    (tmp_path / SAVED).mkdir(parents=True)
    for path in ("solver.py", f"{SAVED}/made.json"):
        (tmp_path / path).write_text("1")
    for args in (("init", "-q"), ("add", "."), (*IDENTITY, "commit", "-q", "--no-gpg-sign", "-m", "one")):
        subprocess.run(["git", *args], cwd=tmp_path, check=True)
    return tmp_path


def test_saved_results_are_no_changes(checkout: Path) -> None:
    (checkout / SAVED / "made.json").write_text("2")
    (checkout / SAVED / "other.json").write_text("3")
    refuse_changes(checkout)
    assert len(commit(checkout)) == 12


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["solver.py"], rf"solver.py\); .* none outside {SAVED}"),
        (["new.py"], rf"new.py\); .* none outside {SAVED}"),
        ([f"{at}.py" for at in range(5)], r"0.py, 1.py, 2.py and 2 more\)"),
    ],
    ids=str,
)
def test_changed_and_new_files_are_refused_and_marked(checkout: Path, names: list[str], told: str) -> None:
    for name in names:
        (checkout / name).write_text("2")
    with pytest.raises(UsageError, match=rf"uncommitted changes \({told}") as caught:
        refuse_changes(checkout)
    assert "\n" not in str(caught.value)
    assert commit(checkout)[12:] == "+"


def test_without_a_commit_nothing_is_saved(tmp_path: Path) -> None:
    assert commit(tmp_path) == "unknown"
    with pytest.raises(UsageError, match="has no git commit"):
        refuse_changes(tmp_path)


def test_the_driver_refuses_to_save_before_it_runs_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkout: Path
) -> None:
    (checkout / "solver.py").write_text("2")
    monkeypatch.setattr(driver, "refuse_changes", lambda: refuse_changes(checkout))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "netmoe", "--save"])
    assert driver.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --save with uncommitted changes (solver.py)")
    assert err.count("\n") == 1


def result_of(*rows: Row) -> Result:
    """A result of one section."""
    section = Section(title="Growth", quality="none", baseline="", note="", rows=list(rows))
    return replace(RESULT, sections=[section])


def grown(sizes: tuple[int, ...], power: float, method: str = "own", axis: str = "n") -> list[Row]:
    return [Row(f"n={n}", method, seconds=1e-6 * n**power, axis=axis, size=n) for n in sizes]


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
def test_the_exponent_is_the_power_of_the_largest_sizes_whatever_the_order_of_rows(power: float) -> None:
    small = [Row(f"n={n}", "own", seconds=1.0, axis="n", size=n) for n in (1, 2)]
    (curve,) = curves(result_of(*grown((64, 16, 8, 32), power), *small))
    assert curve.sizes == (1, 2, 8, 16, 32, 64)
    assert len(curve.sizes) == FITTED + 2
    assert curve.exponent == pytest.approx(power, abs=1e-9)


def test_rows_without_a_size_or_of_one_are_no_curve_nor_picture_and_two_sizes_no_exponent(tmp_path: Path) -> None:
    sizeless = result_of(Row("n", "own", seconds=1.0))
    draw(sizeless, tmp_path / "one.svg")
    assert curves(sizeless) == []
    assert not (tmp_path / "one.svg").exists()
    assert curves(result_of(*grown((1, 2), 1)))[0].exponent is None
    assert curves(result_of(*grown((8, 8), 1))) == []


def test_rows_that_were_not_timed_are_a_curve_of_their_quality_and_have_no_exponent(tmp_path: Path) -> None:
    rows = [Row(f"n={n}", method, quality=0.5, axis="n", size=n) for n in (1, 2, 3) for method in "abcdefg"]
    found = curves(result_of(*rows))
    assert (found[0].method, found[0].values, found[0].quality) == ("a", (0.5, 0.5, 0.5), "none")
    assert all(curve.exponent is None for curve in found)
    draw(result_of(*rows), tmp_path / "one.svg")
    assert b"CPU seconds" not in (picture := (tmp_path / "one.svg").read_bytes())
    assert b">none<" in picture


def test_the_same_figures_give_the_same_picture(tmp_path: Path) -> None:
    result = result_of(*grown((4, 8, 16), 1), *grown((4, 8, 16), 2, "other"), *grown((1, 10), 1, axis="m"))
    for name in ("one.svg", "two.svg"):
        draw(result, tmp_path / name)
    one, two = (Path(tmp_path, name).read_bytes() for name in ("one.svg", "two.svg"))
    assert one == two
    assert b"dc:date" not in one
    assert all(label in one for label in (b"other", b"own", b">m<"))


ROOT = Path(__file__).parents[2]
DRIVER = [sys.executable, "-m", "benchmarks"]


def rows_of(subject: str, title: str, instance: int = 0) -> dict[str, Row]:
    """The rows of one quick instance by method."""
    study: Study[Any] = next(study for study in studies(subject) if study.title.startswith(title))
    return {row.method: row for row in study.rows(list(study.instances(Settings(quick=True)))[instance])}


def figures(row: Row) -> tuple[float, float]:
    """The quality and the bound that a row must have."""
    return known(row.quality), known(row.bound)


def test_every_case_is_registered_with_titles_that_differ() -> None:
    cases = {path.stem for path in (ROOT / "benchmarks" / "cases").iterdir() if not path.name.startswith("__")}
    assert cases == set(SUBJECTS)
    for name in SUBJECTS:
        titles = [study.title for study in studies(name)]
        assert 0 < len(titles) == len(set(titles))


def test_a_global_frequency_changes_nothing_and_the_oracle_keeps_its_bound() -> None:
    rows = rows_of("netmoe", "Ablation")
    none, per_sample, oracle = (figures(rows[name])[0] for name in ("none", "per sample", "oracle"))
    assert figures(rows["global"])[0] == none
    assert none < per_sample <= oracle <= figures(rows["oracle"])[1]


def test_all_methods_of_an_assignment_reach_the_bound() -> None:
    rows = rows_of("assignment", "Beside")
    assert len({figure for row in rows.values() for figure in figures(row)}) == 1
    assert rows["km (scipy)"].ratio == 1
    assert all(row.seconds and row.memory_bytes for row in rows.values())


def test_the_reduction_of_table_5_is_below_its_bound_and_the_paper_method_gives_the_same() -> None:
    rows = rows_of("netmoe", "Table 5")
    saved, bound = figures(rows["sum"])
    assert saved == rows["paper (km)"].quality
    assert 0.38 < saved <= bound < 0.5


def test_a_call_of_the_closed_form_loses_nothing_to_brute_force() -> None:
    rows = rows_of("pipemoe", "What a call costs")
    assert rows["optimal_degree"].quality == rows["optimal_degrees"].quality == rows["brute force"].quality == 0


def test_three_layers_bound_better_than_pairs_and_no_less_than_is_kept() -> None:
    rows = rows_of("bounds", "Dirichlet")
    kept, bound = figures(rows["three-layer"])
    assert kept <= bound < min(figures(row)[1] for kind, row in rows.items() if kind != "three-layer")


def test_absent_data_is_skipped_in_sight(tmp_path: Path) -> None:
    done = subprocess.run([*DRIVER, "fits", "--data", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SKIPPED: no gpu-measurements") == len(studies("fits"))


def test_an_unknown_subject_is_refused() -> None:
    done = subprocess.run([*DRIVER, "nonsense"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no subject nonsense" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_prints_what_there_is_and_ends_with_130() -> None:
    started = subprocess.Popen(
        [*DRIVER, "pipemoe", "--quick"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert "Table IV" in known(started.stderr).readline()
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "pipemoe, quick" in out
    assert "interrupted" in err
    assert "Traceback" not in err


class Clock:
    """A clock that only its own calls move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_one_slow_round_moves_neither_median_nor_ratio() -> None:
    clock, count = Clock(), iter(range(10**6))
    calls = {"base": lambda: clock.wait(2.0), "own": lambda: clock.wait(1000.0 if next(count) == 2 else 1.0)}
    found = race(calls, "base", rounds=5, memory=False, clock=clock)["own"]
    assert (found.seconds, found.least_s, found.ratio) == pytest.approx((1.0, 1.0, 2.0))


@pytest.mark.parametrize(("budget_s", "rounds"), [(1.0, 3), (5.0, 10), (5.4, 10), (100.0, 25)])
def test_the_budget_sets_how_often_calls_run_from_three_rounds_to_25(budget_s: float, rounds: int) -> None:
    clock, made = Clock(), {"a": 0, "b": 0}

    def call(name: str, seconds: float) -> None:
        made[name] += 1
        clock.wait(seconds)

    race({"a": lambda: call("a", 0.2), "b": lambda: call("b", 0.3)}, budget_s=budget_s, memory=False, clock=clock)
    assert made == {"a": 1 + rounds, "b": 1 + rounds}  # warmed up by one call


def test_a_short_call_is_warmed_up_twice_and_runs_in_bursts() -> None:
    clock, made = Clock(), [0]

    def call() -> None:
        made[0] += 1
        clock.wait(0.05 if made[0] == 1 else 2.0**-10)  # the first one loads

    found = race({"": call}, rounds=3, memory=False, clock=clock)[""]
    assert made[0] == 2 + 3 * 3  # 3 of 2**-10 s are the least that last 0.002 s
    assert found.seconds == 2.0**-10


def test_calls_take_turns_with_the_collector_off() -> None:
    order: list[str] = []
    enabled: list[bool] = []

    def call(name: str) -> None:
        order.append(name)
        enabled.append(gc.isenabled())

    race({"a": lambda: call("a"), "b": lambda: call("b")}, rounds=2, memory=False)
    changes = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    assert changes == ["a", "b"] * 3  # warmed up, then two rounds
    assert not any(enabled[-2:])
    assert gc.isenabled()


def test_a_call_returns_its_value_and_its_memory_is_that_of_its_arrays() -> None:
    found = race({"ones": lambda: np.ones(10**6)}, rounds=1)["ones"]
    assert found.value.sum() == 10**6
    assert found.ratio is None
    assert 8e6 <= known(found.memory_bytes) < 8.1e6
    assert peak_bytes(lambda: np.ones(10**6)[:10].copy()) >= 8e6  # the peak, not what stays
