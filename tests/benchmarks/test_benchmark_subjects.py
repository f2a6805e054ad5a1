"""The subjects, in their quick forms, and the driver."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study import SUBJECTS, Row, Settings, Study, studies

ROOT = Path(__file__).parents[2]
DRIVER = [sys.executable, "-m", "benchmarks"]


def rows_of(subject: str, title: str, instance: int = 0) -> dict[str, Row]:
    """The rows of one quick instance by method."""
    study: Study[Any] = next(study for study in studies(subject) if study.title.startswith(title))
    return {row.method: row for row in study.rows(list(study.instances(Settings(quick=True)))[instance])}


def figures(row: Row) -> tuple[float, float]:
    """The quality and the bound that a row must have."""
    assert row.quality is not None
    assert row.bound is not None
    return row.quality, row.bound


def test_every_case_is_registered() -> None:
    cases = {path.stem for path in (ROOT / "benchmarks" / "cases").iterdir() if not path.name.startswith("__")}
    assert cases == set(SUBJECTS)


@pytest.mark.parametrize("name", SUBJECTS)
def test_titles_of_a_subject_differ(name: str) -> None:
    titles = [study.title for study in studies(name)]
    assert titles
    assert len(titles) == len(set(titles))


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
    assert started.stderr is not None
    assert "Table IV" in started.stderr.readline()
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "pipemoe, quick" in out
    assert "interrupted" in err
    assert "Traceback" not in err
