"""Fits: the best kind on held-out sizes, errors that no held-out size has influenced, predictions, JSON."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from moeplan.files import canonical_json
from moeplan.profilers.cases import CASES
from moeplan.profilers.fits.experts import ExpertSurface
from moeplan.profilers.fits.fit import Fit, HeldOut, interval
from moeplan.profilers.fits.fitting import fit_arrays, fit_series
from moeplan.profilers.fits.laws import AlphaBeta, AttentionLaw
from moeplan.profilers.fits.piecewise import Piecewise
from moeplan.profilers.fits.sizes import Sizes, distinct, folds
from moeplan.profilers.fits.surface import Surface
from moeplan.profilers.measurement import Measurement
from tests.builders import known

BYTES = np.array([2**power for power in range(8, 24)])
GEMMS = np.array(list(itertools.product((1, 8, 64, 512), (64, 256, 1024, 4096), (128, 512, 2048))))


def fitted(size: dict[str, np.ndarray], seconds: np.ndarray) -> Fit:
    works = np.prod([column.astype(float) for column in size.values()], axis=0)
    return known(fit_arrays(size, works, seconds))


def gemm(seconds: np.ndarray) -> Fit:
    return fitted(dict(zip("mnk", GEMMS.T, strict=True)), seconds)


def steps(n: np.ndarray) -> np.ndarray:
    """Two protocols: the second starts later and is faster."""
    return np.where(n < 2**15, 5e-6 + 1e-9 * n, 3e-5 + 5e-11 * n)


def test_the_kind_with_the_least_median_error_is_chosen_and_alpha_beta_kept() -> None:
    line = fitted({"bytes": BYTES}, 2e-6 + 1e-9 * BYTES)
    assert isinstance(line.model, AlphaBeta)
    bent = fitted({"bytes": BYTES}, steps(BYTES))
    assert isinstance(bent.model, Piecewise)
    assert bent.model.kind == "piecewise_linear"
    power = fitted({"bytes": BYTES}, 1e-6 * BYTES**0.7)
    assert power.model.kind == "piecewise"
    for found in (line, bent, power):
        least = min(found.held_out.values(), key=lambda held: held.median_error)
        assert found.held_out[found.model.kind] == least
        assert set(found.held_out) == {"alpha_beta", "piecewise", "piecewise_linear"}
    assert bent.alpha_beta == AlphaBeta.of(BYTES.astype(float), steps(BYTES))


def test_errors_are_those_of_models_fitted_by_hand_to_the_other_sizes() -> None:
    found = fitted({"bytes": BYTES}, steps(BYTES))
    for kind in ("piecewise", "piecewise_linear"):
        errors: dict[int, float] = {}
        for first in (1, 2):
            out = list(range(first, len(BYTES) - 1, 2))
            seen = np.delete(BYTES, out).astype(float)
            model = Piecewise.of(seen, steps(seen), kind)
            errors |= {BYTES[at]: abs(model.seconds(BYTES[at : at + 1])[0] / steps(BYTES[at]) - 1) for at in out}
        held = found.held_out[kind]
        assert held.num_sizes == len(BYTES) - 2
        assert held.median_error == pytest.approx(np.median(list(errors.values())))
        assert held.sizes[0] == (max(errors, key=errors.__getitem__),)
        assert held.worst_error == pytest.approx(max(errors.values()))


def test_an_n_dimensional_law_is_predicted_by_the_surface() -> None:
    found = gemm(np.maximum(GEMMS.prod(axis=1) / 1e13, GEMMS[:, 1] * GEMMS[:, 2] / 1e11))
    assert isinstance(found.model, Surface)
    assert found.held_out["surface"].median_error < 0.15 < found.held_out["alpha_beta"].median_error


def test_attention_is_predicted_by_its_own_law() -> None:
    batch, length, hidden = np.array(list(itertools.product((1, 4, 16), (64, 256, 1024, 4096), (512,)))).T
    seconds = 1e-5 + 2e-14 * batch * length * hidden**2 + 7e-14 * batch * length**2 * hidden
    found = fitted({"batch": batch, "length": length, "hidden": hidden}, seconds)
    assert isinstance(found.model, AttentionLaw)
    assert found.held_out["attention"].worst_error < 1e-6


def test_calls_are_told_from_the_start_and_no_line_over_work_is_tried_on_them() -> None:
    sizes = itertools.product((1, 4, 16), (16, 64, 256, 1024), (64, 256), (1, 16))
    batch, length, hidden, calls = np.array([size for size in sizes if size[0] >= size[3]]).T
    seconds = 3e-5 + 2e-5 * calls + 2e-14 * batch * length * hidden**2 + 7e-14 * batch * length**2 * hidden
    axes = {"batch": batch, "length": length, "hidden": hidden, "calls": calls}
    found = known(fit_arrays(axes, batch * length * hidden * (4.0 * hidden + length), seconds))
    assert isinstance(found.model, AttentionLaw)
    assert (found.model.start_s, found.model.call_s) == pytest.approx((5e-5, 2e-5))
    assert {*found.held_out} == {"attention", "surface"}
    whole = {axis: column[calls == 1] for axis, column in axes.items()}  # as a run leaves it that ended early
    left = known(fit_arrays(whole, batch[calls == 1] * length[calls == 1] * 64.0, seconds[calls == 1]))
    assert isinstance(left.model, AttentionLaw)
    assert left.model.start_s == pytest.approx(5e-5)
    assert left.model.call_s is None


def test_sizes_outside_the_measured_range_of_any_axis_are_flagged() -> None:
    found = gemm(2e-6 + GEMMS.prod(axis=1) / 1e13)
    m, k = np.array([1, 513, 64, 0]), np.array([128, 128, 4096, 128])
    prediction = found.predict({"m": m, "n": 64, "k": k}, m * 64 * k)
    assert prediction.extrapolated.tolist() == [False, True, True, True]
    assert prediction.seconds.shape == (4,)


def test_the_corner_that_a_bounded_grid_leaves_out_is_flagged_and_no_other_size() -> None:
    works = GEMMS.prod(axis=1).astype(float)
    kept = GEMMS[works <= 2**27]
    found = fitted(dict(zip("mnk", kept.T, strict=True)), 2e-6 + kept.prod(axis=1) / 1e13)
    prediction = found.predict(dict(zip("mnk", GEMMS.T, strict=True)), works)
    assert (prediction.extrapolated == (works > 2**27)).all()
    assert 0 < prediction.extrapolated.sum() < len(GEMMS)


@pytest.mark.parametrize(("num_held_out", "least"), [(3, 0.72), (7, 0.84), (37, 0.93), (39, 0.93), (300, 0.94)])
def test_the_interval_holds_as_many_unseen_sizes_as_it_says(num_held_out: int, least: float) -> None:
    rng = np.random.default_rng(num_held_out)
    n = np.unique(np.geomspace(2**10, 2**24, num_held_out + 2).astype(int))
    held = []
    for _ in range(100):
        found = fitted({"bytes": n}, (1e-4 + 1e-9 * n) * rng.lognormal(0, 0.2, len(n)))
        unseen = rng.integers(2**10, 2**24, 50)
        seconds = (1e-4 + 1e-9 * unseen) * rng.lognormal(0, 0.2, 50)
        prediction = found.predict({"bytes": unseen}, unseen)
        held.append(((prediction.low <= seconds) & (seconds <= prediction.high)).mean())
        factors = np.stack([prediction.low, prediction.high]) / prediction.seconds
        assert pytest.approx(np.tile([found.low_factor, found.high_factor], (50, 1))) == factors.T
    assert np.mean(held) >= least


def test_the_interval_of_few_ratios_is_their_range_on_both_sides_and_of_many_the_order_statistics() -> None:
    assert interval(np.array([])) == (1.0, 1.0)
    assert interval(np.array([0.5, 0.9, 1.1])) == (0.5, 2.0)
    assert interval(np.array([0.9, 1.0, 4.0])) == (0.25, 4.0)
    assert interval(np.linspace(0.8, 0.9, 38)) == pytest.approx((0.8, 1.25))
    assert interval(np.linspace(0.5, 1.5, 39)) == (0.5, 1.5)
    assert interval(np.linspace(0.5, 1.5, 80)) == pytest.approx((0.5 + 1 / 79, 1.5 - 1 / 79))
    assert interval(np.linspace(0.8, 0.9, 79)) == pytest.approx((0.8 + 0.1 / 78, 1.0))
    assert interval(np.linspace(1.2, 1.3, 79)) == pytest.approx((1.0, 1.3 - 0.1 / 78))


def test_an_interval_of_few_sizes_is_said_to_be_their_range() -> None:
    few, many = (fitted({"bytes": np.arange(2, count + 4)}, np.arange(2.0, count + 4)) for count in (3, 39))
    assert few.held_out["alpha_beta"].interval == "range of 3 held-out sizes"
    assert many.held_out["alpha_beta"].interval.startswith("95 % of unseen sizes")


def test_pairs_of_ranks_are_no_axes_of_a_fit() -> None:
    pairs, counts = list(itertools.combinations(range(4), 2)), [2**power for power in (6, 10, 14, 18, 22)]
    measured = [
        Measurement.of({"bytes": n, "first": one, "second": two}, n, [(1e-5 + 1e-9 * n) * (1 + (one + two) / 10)] * 6)
        for n in counts
        for one, two in pairs
    ]
    found = known(fit_series(CASES["point_to_point"], 2, measured))
    assert found.axes == ("bytes",)
    held = found.held_out[found.model.kind]
    assert sorted(held.sizes) == [(n,) for n in counts[1:-1]]
    assert found.predict({"bytes": 2**14}, 2**14).seconds == pytest.approx(1.3 * (1e-5 + 1e-9 * 2**14), rel=0.01)


def test_too_few_sizes_give_no_fit_or_one_without_an_error() -> None:
    assert fit_arrays({}, np.array([]), np.array([])) is None
    assert fit_arrays({"bytes": np.array([5, 5])}, np.array([5.0, 5]), np.array([1.0, 2])) is None
    two = fitted({"bytes": np.array([5, 6])}, np.array([1.0, 2.0]))
    assert two.held_out == {}
    assert isinstance(two.model, AlphaBeta)
    prediction = two.predict({"bytes": 5}, 5.0)
    assert prediction.low == prediction.seconds == prediction.high


def test_nothing_is_predicted_below_the_smallest_median_unless_the_fit_is_of_before() -> None:
    m, n, k = GEMMS.T
    found = gemm(1e-12 * m * n * k)
    size = dict.fromkeys("mnk", np.array([1, 1000]))
    works = np.array([1.0, 1e9])
    least = 1e-12 * float((m * n * k).min())
    assert found.predict(size, works).seconds[0] == pytest.approx(least)
    before = dataclasses.replace(found, least_s=None)
    assert before.predict(size, works).seconds[0] < 0.1 * least
    assert before.predict(size, works).seconds[1] == found.predict(size, works).seconds[1]
    stored = TypeAdapter(Fit).dump_python(found, mode="json")
    del stored["least_s"]
    assert TypeAdapter(Fit).validate_json(canonical_json(stored), strict=True) == before


FITS = st.one_of(
    st.lists(
        st.tuples(st.integers(1, 2**30), st.floats(1e-7, 1e2)), min_size=2, max_size=8, unique_by=lambda p: p[0]
    ).map(lambda points: fitted({"bytes": np.array([n for n, _ in points])}, np.array([t for _, t in points]))),
    st.lists(st.floats(1e-7, 1e2), min_size=len(GEMMS), max_size=len(GEMMS)).map(lambda times: gemm(np.array(times))),
)


@settings(max_examples=25)
@given(found=FITS)
def test_fits_come_back_from_json(found: Fit) -> None:
    adapter = TypeAdapter(Fit)
    text = canonical_json(adapter.dump_python(found, mode="json"))
    again = adapter.validate_json(text, strict=True)
    assert again == found
    size = {axis: np.array([1, 100, 10**6]) for axis in found.axes}
    assert (again.predict(size, 7.0).seconds == found.predict(size, 7.0).seconds).all()


def sizes(**axes: list[int]) -> Sizes:
    points = np.array(list(axes.values())).T
    works = points.prod(axis=1).astype(float)
    return Sizes(tuple(axes), points, works, works)


@pytest.mark.parametrize("count", range(1, 10))
def test_along_one_axis_every_inner_size_is_held_out_once_and_the_ends_never(count: int) -> None:
    held = folds(sizes(bytes=[2**power for power in range(count)]))
    times = np.sum(held, axis=0) if held else np.zeros(count)
    assert times.tolist() == [0, *[1] * (count - 2), 0][:count] if count > 1 else times.tolist() == [0]
    for unseen in held:
        assert not (unseen[1:] & unseen[:-1]).any()


def test_all_m_of_an_n_and_k_are_held_out_together_and_each_once() -> None:
    grid = [(m, n, k) for n in (2, 4, 8) for k in (3, 9, 27) for m in (1, 2, 3, 4, 5)]
    m, n, k = (list(column) for column in zip(*grid, strict=True))
    held = folds(sizes(n=n, m=m, k=k))
    assert len(held) == 5
    assert (np.sum(held, axis=0) == 1).all()
    for unseen in held:
        out = {(n[at], k[at]) for at in np.flatnonzero(unseen)}
        assert unseen.tolist() == [(n[at], k[at]) in out for at in range(len(grid))]


def test_with_few_groups_sizes_of_equal_work_are_held_out_together() -> None:
    held = folds(sizes(m=[1, 2, 4, 2, 4, 8], n=[1, 1, 1, 2, 2, 2]))  # works 1, 2, 4, 4, 8, 16
    assert [np.flatnonzero(unseen).tolist() for unseen in held] == [[1, 4], [2, 3]]


def test_of_few_curves_every_inner_size_of_each_is_held_out_once_and_the_ends_never() -> None:
    grid = sizes(m=[1, 2, 4, 8, 1, 2, 4], n=[1, 1, 1, 1, 3, 3, 3])
    assert np.sum(folds(grid, "m"), axis=0).tolist() == [0, 1, 1, 0, 0, 1, 0]


def test_a_fit_through_curves_is_a_surface_or_along_one_axis_no_line() -> None:
    m, n = np.array(list(itertools.product((1, 4, 16, 64), (2, 8)))).T
    works, seconds = (m * n).astype(float), 1e-6 * m * n
    assert known(fit_arrays({"m": m, "n": n}, works, seconds)).model.kind == "alpha_beta"
    assert known(fit_arrays({"m": m, "n": n}, works, seconds, curve="m")).model.kind == "surface"
    one = known(fit_arrays({"m": m[::2]}, works[::2], seconds[::2], curve="m"))
    assert one.model.kind.startswith("piecewise")


def test_the_worst_sizes_come_first_and_no_more_than_32() -> None:
    errors = np.random.default_rng(0).random(100)
    held = HeldOut.of(np.arange(100)[:, None], errors)
    assert held.num_sizes == 100
    assert (held.median_error, held.worst_error) == (np.median(errors), errors.max())
    assert held.p95_error == pytest.approx(np.percentile(errors, 95))
    assert [errors[at] for (at,) in held.sizes] == sorted(errors, reverse=True)[:32] == list(held.errors)


def test_distinct_rows_are_those_of_numpy() -> None:
    rows = np.random.default_rng(0).integers(0, 4, (200, 3))
    oracle, inverse = np.unique(rows, axis=0, return_inverse=True)
    first, place = distinct(list(rows.T))
    assert (rows[first] == oracle).all()
    assert (place == inverse.reshape(-1)).all()


def test_a_size_measured_often_is_one_at_its_median() -> None:
    merged = Sizes.merged({"n": np.array([5, 3, 5, 5, 3])}, np.array([5.0, 3, 5, 5, 3]), np.array([9.0, 1, 2, 4, 3]))
    assert merged.points.tolist() == [[3], [5]]
    assert merged.seconds.tolist() == [2.0, 4.0]
    assert merged.works.tolist() == [3.0, 5.0]


EXPERTS = np.array(list(itertools.product((4, 64, 1024, 16384), (4, 8, 64), (1024, 4096), (512, 2048, 8192), (1,))))
EXPERT_AXES = ("tokens", "experts", "hidden", "ffn", "grouped")


def expert_seconds(tokens: np.ndarray, experts: np.ndarray, hidden: np.ndarray, ffn: np.ndarray) -> np.ndarray:
    """An H200 in bf16 that starts in 20 us, reads 4.4 TB/s and reaches 700 TFLOP/s, late where rows are wide."""
    weights = np.minimum(tokens, experts) * hidden * ffn
    return np.asarray((2e-5 + 6 * weights / 4.4e12 + 6 * tokens * hidden * ffn / 700e12) * (1 + hidden / 40_000))


def test_experts_are_predicted_by_their_law_and_fewer_than_measured_read_fewer_weights() -> None:
    found = fitted(dict(zip(EXPERT_AXES, EXPERTS.T, strict=True)), expert_seconds(*EXPERTS.T[:4]))
    assert found.model.kind == "experts"
    assert found.held_out["experts"].median_error < found.held_out["surface"].median_error / 2
    tokens, one, side = np.array([16, 256, 4096]), np.array(1), np.array(2880)
    exact = expert_seconds(tokens, one, side, side)
    few = dict(zip(EXPERT_AXES, (tokens, one, side, side, one), strict=True))
    prediction = found.predict(few, tokens * 3 * 2880**2)
    assert prediction.seconds == pytest.approx(exact, rel=0.1)
    assert prediction.extrapolated.all()


def test_a_surface_of_experts_passes_through_what_was_measured_and_comes_back_from_json() -> None:
    seconds = expert_seconds(*EXPERTS.T[:4]) * np.random.default_rng(0).lognormal(0, 0.3, len(EXPERTS))
    columns = dict(zip(EXPERT_AXES, EXPERTS.T.astype(float), strict=True))
    surface = ExpertSurface.of(("tokens", "experts", "hidden", "ffn"), columns, seconds)
    assert surface.seconds(*EXPERTS.T[:4].astype(float)) == pytest.approx(seconds, rel=1e-5)
    adapter = TypeAdapter(ExpertSurface)
    assert adapter.validate_json(adapter.dump_json(surface)) == surface
