"""Exponents of growth and the picture."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.growth import FITTED, curves, draw
from benchmarks.result import Result, Section
from benchmarks.study import Row
from tests.benchmarks.test_benchmark_pages import RESULT


def result_of(*rows: Row) -> Result:
    """A result of one section."""
    section = Section(title="Growth", quality="none", baseline="", note="", rows=list(rows))
    return replace(RESULT, sections=[section])


def grown(sizes: tuple[int, ...], power: float, method: str = "own", axis: str = "n") -> list[Row]:
    return [Row(f"n={n}", method, seconds=1e-6 * n**power, axis=axis, size=n) for n in sizes]


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
def test_the_exponent_is_the_power_whatever_the_order_of_rows(power: float) -> None:
    (curve,) = curves(result_of(*grown((64, 4, 16, 8), power)))
    assert curve.sizes == (4, 8, 16, 64)
    assert curve.exponent == pytest.approx(power, abs=1e-9)


def test_the_exponent_ignores_all_but_the_largest_sizes() -> None:
    flat = [Row(f"n={n}", "own", seconds=1.0, axis="n", size=n) for n in (1, 2)]
    (curve,) = curves(result_of(*flat, *grown((8, 16, 32, 64), 2)))
    assert len(curve.sizes) == FITTED + 2
    assert curve.exponent == pytest.approx(2)


def test_rows_without_a_size_are_no_curve_and_two_sizes_no_exponent() -> None:
    assert curves(result_of(Row("n", "own", seconds=1.0))) == []
    assert curves(result_of(*grown((1, 2), 1)))[0].exponent is None


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


def test_no_curves_give_no_picture(tmp_path: Path) -> None:
    draw(result_of(Row("n", "own", seconds=1.0)), tmp_path / "one.svg")
    assert not (tmp_path / "one.svg").exists()
