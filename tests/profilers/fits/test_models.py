"""The models of seconds: closed laws, monotone curves, the surface in many axes; and which series predicts a case."""

import base64
import dataclasses
import itertools
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import RBFInterpolator
from scipy.optimize import lsq_linear

from moeplan.errors import InputError, UsageError
from moeplan.profilers.cases import CASES
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.fits.experts import ExpertLaw
from moeplan.profilers.fits.fit import Fit, HeldOut
from moeplan.profilers.fits.fitting import fit_arrays
from moeplan.profilers.fits.laws import MIN_SLOPE, AlphaBeta, AttentionLaw
from moeplan.profilers.fits.piecewise import Piecewise
from moeplan.profilers.fits.roofline import Roofline
from moeplan.profilers.fits.surface import Surface
from moeplan.profilers.origin import Origin, now
from moeplan.profilers.predictor import predict, predicted
from moeplan.profilers.profile import Profile
from moeplan.profilers.series import Series
from tests.builders import series

GRID = np.array(list(itertools.product((1, 4, 16), (64, 512, 4096), (256, 1024))), dtype=np.float64).T
POINTS = st.lists(
    st.tuples(st.integers(1, 2**34), st.floats(1e-7, 1e2)), min_size=2, max_size=20, unique_by=lambda point: point[0]
)


def loss(n: np.ndarray, t: np.ndarray, a: float, b: float) -> float:
    return float((((a + b * n) / t - 1) ** 2).sum())


@given(points=POINTS)
def test_no_bounded_solver_finds_a_smaller_relative_error(points: list[tuple[int, float]]) -> None:
    n, t = np.array(points, dtype=np.float64).T
    found = AlphaBeta.of(n, t)
    columns = np.stack([1 / t, n / t], axis=1)
    scale = np.linalg.norm(columns, axis=0)
    oracle = lsq_linear(columns / scale, np.ones(len(t)), bounds=(0, np.inf), tol=1e-12).x / scale
    assert found.a_s >= 0
    assert found.b_s > 0
    assert loss(n, t, found.a_s, found.b_s) <= loss(n, t, *oracle) * (1 + 1e-6) + 1e-6


def test_times_that_fall_with_size_give_a_flat_line_and_never_a_negative_slope() -> None:
    found = AlphaBeta.of(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0]))
    assert found.b_s == MIN_SLOPE
    assert found.seconds(np.array([3.0])) == pytest.approx(found.a_s)


def test_the_coefficients_come_back() -> None:
    batch, length, hidden = GRID
    law = AttentionLaw(start_s=2e-5, projection_s=3e-14, score_s=5e-14)
    seconds = [2e-5 + (3e-14 * m + 5e-14 * tokens) * sequences * tokens * m for sequences, tokens, m in GRID.T]
    assert law.seconds(batch, length, hidden) == pytest.approx(seconds)
    found = AttentionLaw.of(batch, length, hidden, t=np.array(seconds))
    assert (found.start_s, found.projection_s, found.score_s) == pytest.approx((2e-5, 3e-14, 5e-14))
    assert found.call_s is None


def test_the_call_of_an_attention_law_comes_back_and_is_none_where_calls_cost_nothing_more() -> None:
    batch, length, hidden = GRID
    calls = np.where(np.arange(len(batch)) % 2, batch, 1.0)
    for call_s in (8e-6, 0.0):
        law = AttentionLaw(start_s=2e-5, call_s=call_s, projection_s=3e-14, score_s=5e-14)
        seconds = law.seconds(batch, length, hidden, calls)
        once = AttentionLaw(start_s=2e-5, projection_s=3e-14, score_s=5e-14).seconds(batch, length, hidden)
        assert seconds - once == pytest.approx(call_s * (calls - 1))
        found = AttentionLaw.of(batch, length, hidden, calls, t=seconds)
        assert (found.start_s, found.call_s) == pytest.approx((2e-5, call_s))


def test_no_coefficient_is_negative_where_times_fall() -> None:
    batch, length, hidden = GRID
    found = AttentionLaw.of(batch, length, hidden, t=1 / (batch * length * hidden))
    assert min(found.start_s, found.projection_s, found.score_s) >= 0


def roofline_s(batch: float, length: float, hidden: float, q: float, kv: float, queries: float) -> float:
    sizes = {"batch": batch, "length": length, "hidden": hidden, "q": q, "kv": kv, "queries": queries}
    return float(ROOFLINE.seconds(**{axis: np.array([float(size)]) for axis, size in sizes.items()})[0])


def test_the_roofline_of_whole_sequences_is_the_work_of_the_case_at_the_rate_that_is_reached() -> None:
    size = {"batch": 8, "length": 2048, "hidden": 4096}
    seconds = roofline_s(size["batch"], size["length"], size["hidden"], 4096, 8192, 2048)
    assert seconds == pytest.approx(2 * CASES["attention"].work(size, 1) / 0.5e15)


def test_the_roofline_of_tokens_decoded_one_a_step_reads_the_keys_and_values_of_every_context() -> None:
    tokens, position, kv = 64, 3000, 1024
    length = 2 * position + 1  # as `solvers.seconds` has it
    read = 4096 * (2 * 6144 + kv) + 2 * tokens * 4096 + tokens * kv + tokens * (position + 1) * kv
    assert roofline_s(tokens / length, length, 4096, 6144, kv, 1) == pytest.approx(2 * read / 2e12)
    shared_s = roofline_s(tokens / length, length, 4096, 6144, kv, tokens)  # of one sequence: its context is read once
    assert shared_s < 0.3 * 2 * read / 2e12


def test_scores_and_projections_of_a_roofline_grow_with_the_queries_elements() -> None:
    batch, length, hidden, kv = 4, 1024, 2880, 1024
    more_s = roofline_s(batch, length, hidden, 4096, kv, length) - roofline_s(batch, length, hidden, 2880, kv, length)
    assert more_s == pytest.approx(2 * batch * length * (2 * hidden + length + 1) * (4096 - 2880) / 0.5e15)


def test_attention_of_no_tokens_reads_the_weights() -> None:
    assert roofline_s(0, 1, 1024, 768, 512, 0) == pytest.approx(2 * 1024 * (1536 + 512) / 2e12)


Kind = Literal["piecewise", "piecewise_linear"]
KINDS = pytest.mark.parametrize("kind", ["piecewise", "piecewise_linear"])
CURVES = st.lists(st.tuples(st.integers(1, 2**40), st.floats(1e-7, 1e2)), min_size=2, max_size=20).filter(
    lambda points: len({n for n, _ in points}) > 1
)


@KINDS
@given(points=CURVES, asked=st.lists(st.floats(1, 2**42), min_size=2, max_size=20))
def test_no_size_takes_less_than_a_smaller_one(kind: Kind, points: list[tuple[int, float]], asked: list[float]) -> None:
    n, t = np.array(points, dtype=np.float64).T
    model = Piecewise.of(n, t, kind)
    found = model.seconds(np.sort(np.array(asked + n.tolist())))
    assert (found > 0).all()
    assert (np.diff(found) >= -1e-9 * found[1:]).all()


@settings(max_examples=40)
@given(values=st.lists(st.integers(1, 5), min_size=2, max_size=5))
def test_knots_are_the_never_falling_values_of_least_absolute_distance(values: list[int]) -> None:
    n, t = np.arange(1.0, len(values) + 1), np.array(values, dtype=np.float64)
    model = Piecewise.of(n, t)
    rising = itertools.combinations_with_replacement(range(1, 6), len(values))
    best = min(sum(abs(one - value) for one, value in zip(row, values, strict=True)) for row in rising)
    assert np.abs(np.array(model.seconds_at) - t).sum() == pytest.approx(best)


def test_one_kind_is_straight_in_the_logs_and_the_other_in_the_numbers() -> None:
    n, t = np.array([1.0, 4.0, 16.0]), np.array([1.0, 8.0, 64.0])
    asked = np.array([2.0, 8.0])
    assert Piecewise.of(n, t, "piecewise").seconds(asked) == pytest.approx(asked**1.5)
    assert Piecewise.of(n, t, "piecewise_linear").seconds(asked) == pytest.approx([1 + 7 / 3, 8 + 56 / 3])


@KINDS
def test_it_is_constant_below_and_keeps_the_last_slope_beyond(kind: Kind) -> None:
    n = np.array([10.0, 100.0, 1000.0])
    model = Piecewise.of(n, n * 1e-6, kind)
    assert model.seconds(np.array([0.0, 1.0, 10.0])) == pytest.approx(1e-5)
    assert model.seconds(np.array([1e5])) == pytest.approx(0.1)


def test_a_steep_last_step_is_continued_in_proportion_to_work() -> None:
    model = Piecewise.of(np.array([88.0, 89.0]), np.array([1.0, 88.0]))
    assert model.seconds(np.array([8900.0])) == pytest.approx(8800)


SITES = list(itertools.product((64, 128, 512, 1024, 4096), (32, 256, 2048, 7168)))
KNOTS = (1, 16, 64, 256, 1024)


def law(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(np.maximum(m * n * k / 1e14, n * k / 1e12), 3e-6))


def points() -> np.ndarray:
    return np.array([(m, n, k) for n, k in SITES for m in KNOTS], dtype=np.float64)


def made() -> Surface:
    return Surface.of(("m", "n", "k"), points(), law(*points().T))


def test_between_sites_it_is_kriging_with_a_linear_variogram_on_a_plane() -> None:
    asked = np.random.default_rng(0).integers(20, 9000, (50, 2)).astype(float)
    for m in KNOTS:
        times = law(float(m), *np.array(SITES, dtype=float).T)  # type: ignore[arg-type]
        oracle = RBFInterpolator(np.log1p(SITES), np.log(times), kernel="linear", degree=1)
        found = made().seconds(np.full(50, float(m)), *asked.T)
        assert np.log(found) == pytest.approx(oracle(np.log1p(asked)), abs=1e-4)


def test_along_the_curve_it_is_straight_in_the_logs_and_keeps_the_last_octaves_slope() -> None:
    site = (np.full(3, 4096.0), np.full(3, 7168.0))
    low, middle, high = np.log(
        made().seconds(np.log1p([0, 0, 0]) + np.array([64.0, np.sqrt(65 * 257) - 1, 256.0]), *site)
    )
    assert middle == pytest.approx((low + high) / 2)
    beyond = made().seconds(np.array([1024.0, 4099.0, 0.0]), *site)
    assert beyond[1] / beyond[0] == pytest.approx(4, rel=0.02)
    assert beyond[2] == pytest.approx(law(*np.array([1.0, 4096.0, 7168.0])), rel=1e-5)


def test_scalars_and_arrays_broadcast_and_many_distinct_sites_agree_with_each_alone() -> None:
    surface = made()
    rng = np.random.default_rng(1)
    m, n, k = rng.integers(1, 9000, (3, 5000)).astype(float)
    together = surface.seconds(m, n, k)
    alone = [float(surface.seconds(*at)) for at in np.stack([m, n, k], axis=1)[::500]]
    assert together[::500] == pytest.approx(alone)
    assert surface.seconds(np.array([]), np.array([]), np.array([])).shape == (0,)
    assert surface.seconds(np.array([[1.0], [2.0]]), np.array(64.0), np.array([32.0, 64.0, 128.0])).shape == (2, 3)


def test_sites_with_curves_of_their_own_sizes_are_read_at_common_knots() -> None:
    rows = np.array([(1, 64), (100, 64), (10, 128), (1000, 128)], dtype=float)
    surface = Surface.of(("tokens", "hidden"), rows, rows[:, 0] + 1)
    assert surface.knots == (1, 10, 100, 1000)
    assert surface.seconds(*rows.T) == pytest.approx(rows[:, 0] + 1, rel=1e-5)


def test_a_site_measured_at_one_size_takes_the_slopes_of_its_neighbours_through_it() -> None:
    every = points()
    seen = every[(every[:, 1] < 4096) | (every[:, 0] == 1)]
    surface = Surface.of(("m", "n", "k"), seen, law(*seen.T))
    assert surface.seconds(*seen.T) == pytest.approx(law(*seen.T), rel=1e-5)
    for n in (2500.0, 4096.0):
        asked = np.full(4, 1024.0), np.full(4, n), np.array([32.0, 256.0, 2048.0, 7168.0])
        assert (np.abs(np.log(surface.seconds(*asked) / law(*asked))) < np.log(4)).all()


def test_more_values_than_knots_are_thinned_and_still_near() -> None:
    m = np.arange(1.0, 401)
    rows = np.array([(at, n) for at in m for n in (8, 16)], dtype=float)
    surface = Surface.of(("m", "n"), rows, rows.prod(axis=1) * 1e-9)
    assert len(surface.knots) <= 96
    assert surface.seconds(*rows.T) == pytest.approx(rows.prod(axis=1) * 1e-9, rel=0.01)


def test_sites_on_a_line_do_without_slopes_across_it() -> None:
    rows = np.array([(m, n, n) for m in (1, 2, 4) for n in (8, 16, 64)], dtype=float)
    surface = Surface.of(("m", "n", "k"), rows, rows.prod(axis=1) * 1e-9)
    assert surface.seconds(*rows.T) == pytest.approx(rows.prod(axis=1) * 1e-9, rel=1e-5)
    assert np.isfinite(surface.seconds(np.array([3.0]), np.array([8.0]), np.array([64.0]))).all()


def encoded(values: list[float]) -> str:
    return base64.b64encode(np.array(values, dtype="<f4").tobytes()).decode()


SURFACE = Surface(axes=("m", "n"), knots=(1, 2), sites=((1,), (2,)), log_seconds=encoded([0.0, 1.0, 2.0, 3.0]))
LINE, CURVE = AlphaBeta(a_s=1.0, b_s=1.0), Piecewise(works=(1.0, 2.0), seconds_at=(1.0, 2.0))
LAW = AttentionLaw(start_s=1.0, projection_s=1.0, score_s=0.0)
ROOFLINE = Roofline(flops=1e15, bytes_per_s=4e12, width=2, compute_share=0.5, memory_share=0.5)
EXPERTS = ExpertLaw(start_s=1.0, weight_s=0.0, product_s=1.0, row_s=0.0)
FIT = Fit(axes=("bytes",), model=LINE, alpha_beta=LINE, held_out={}, measured={"bytes": (1, 5)})
WORST: dict[str, Any] = {"sizes": ((1,), (2,)), "errors": (0.2, 0.0)}
HELD_OUT = HeldOut(num_sizes=2, median_error=0.1, p95_error=0.2, worst_error=0.2, **WORST)
IMPOSSIBLE: list[tuple[Any, str, list[dict[str, Any]]]] = [
    (LINE, "alpha-beta", [{"a_s": -1e-9}, {"a_s": 0.0, "b_s": 0.0}, {"a_s": np.nan}, {"b_s": np.nan}]),
    (LAW, "attention", [{"start_s": -1e-9}, dict.fromkeys(("start_s", "projection_s"), 0.0), {"start_s": np.nan}]),
    (LAW, "attention", [{"call_s": -1e-9}, {"call_s": 1.1}, {"call_s": np.nan}]),
    (ROOFLINE, "roofline", [{"flops": np.nan}, {"bytes_per_s": 0.0}, {"width": 0}, {"compute_share": 1.1}]),
    (EXPERTS, "experts", [{"weight_s": -1e-9}, {"start_s": 0.0, "product_s": 0.0}, {"row_s": np.nan}]),
    (CURVE, "piecewise", [{"works": (1.0,), "seconds_at": (1.0,)}, {"works": (2.0, 1.0)}, {"works": (0.0, 1.0)}]),
    (CURVE, "piecewise", [{"seconds_at": (2.0, 1.0)}, {"seconds_at": (1.0,)}]),
    (SURFACE, "surface", [{"knots": knots} for knots in ((1,), (2, 1), (-1, 1), tuple(range(200)))]),
    (SURFACE, "surface", [{"sites": ((1,), site)} for site in ((1,), (2, 3), (-2,), (2**70,))]),
    (SURFACE, "surface", [{"axes": ("m", "m")}, {"axes": ("m", "n", "k")}]),
    (SURFACE, "surface", [{"log_seconds": encoded([1.0, 2.0, 3.0, *more])} for more in ([], [np.nan], [1e9])]),
    (SURFACE, "surface", [{"log_seconds": "AAA"}, {"log_seconds": "not base64 \u2603"}]),
    (FIT, "fit", [{"measured": {"bytes": (5, 1)}}, {"measured": {"other": (1, 5)}}, {"axes": ()}, {"model": LAW}]),
    (FIT, "fit", [{"low_factor": 1.5}, {"low_factor": np.nan}, {"high_factor": 0.5}]),
    (FIT, "fit", [{"least_s": 0.0}, {"least_s": np.nan}]),
    (HELD_OUT, "held-out", [{"median_error": 0.3}, {"p95_error": 0.9}, {"worst_error": 0.5}, {"num_sizes": 1}]),
    (HELD_OUT, "held-out", [{"num_sizes": 0, "sizes": (), "errors": ()}, {"errors": (0.2,)}, {"errors": (0.2, 0.3)}]),
]


@pytest.mark.parametrize(("good", "named", "spoilt"), [(a, b, one) for a, b, many in IMPOSSIBLE for one in many])
def test_impossible_models_fits_and_errors_are_refused(good: Any, named: str, spoilt: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=named):
        dataclasses.replace(good, **spoilt)


def test_sites_that_floating_point_cannot_tell_apart_are_refused_when_asked() -> None:
    with pytest.raises(InputError, match="cannot tell apart"):
        dataclasses.replace(SURFACE, sites=((2**62,), (2**62 + 1,))).seconds(np.array([1.0]), np.array([3.0]))


BYTES = [{"bytes": 2**power} for power in range(10, 20)]
GEMMS = [{"m": size["bytes"], "n": 8, "k": 4} for size in BYTES]


def profile(*found: Series) -> Profile:
    return Profile.of(Origin(kind="tables", created_at=now(), name="made"), Cluster(1, 8), found)


BOTH = profile(
    series("gemm", dtype="bf16", sizes=GEMMS, a_s=0, b_s=1e-12),
    series("gemm", dtype="fp8", sizes=GEMMS, a_s=0, b_s=5e-13),
    series("all_to_all", 2, "intra", sizes=BYTES, a_s=0, b_s=1e-9),
    series("all_to_all", 8, "intra", sizes=BYTES, a_s=0, b_s=2e-9),
    series("all_to_all", 8, "inter", sizes=BYTES, a_s=0, b_s=9e-9),
)


def test_the_series_named_predicts_over_the_work_of_its_case() -> None:
    size = {"m": np.array([1024, 2048]), "n": np.array(8), "k": np.array(4)}
    assert predict(BOTH, "gemm", size, dtype="fp8").seconds == pytest.approx([1024 * 32 * 5e-13, 2048 * 32 * 5e-13])
    for ranks, link, s_per_byte in ((2, "intra", 1e-9), (8, "intra", 2e-9), (8, "inter", 9e-9)):
        asked: dict[str, Any] = {"ranks": ranks, "link": link}
        found = predict(BOTH, "all_to_all", {"bytes": 4096}, **asked)
        assert predict(BOTH, "all_to_all", {"bytes": 4096}, dtype="bf16", **asked) == found
        assert found.seconds == pytest.approx(4096 * (ranks - 1) / ranks * s_per_byte)
        assert not found.extrapolated


@pytest.mark.parametrize(("ranks", "near"), [(3, 2), (4, 8), (5, 8), (64, 8), (1, 2)])
def test_other_numbers_of_ranks_are_answered_by_the_nearest_and_flagged(ranks: int, near: int) -> None:
    found = predict(BOTH, "all_to_all", {"bytes": [4096, 8192]}, ranks=ranks, link="intra")
    same = predict(BOTH, "all_to_all", {"bytes": [4096, 8192]}, ranks=near, link="intra")
    assert (found.seconds == same.seconds).all()
    assert found.extrapolated.all()
    assert not same.extrapolated.any()


@pytest.mark.parametrize(
    ("case", "asked", "message"),
    [
        ("router", {}, "no fit of router; it has all_to_all, gemm"),
        ("gemm", {}, "gemm is there in dtype bf16, fp8; name one"),
        ("gemm", {"dtype": "fp32"}, "no dtype fp32: gemm is there in dtype bf16, fp8"),
        ("gemm", {"dtype": "fp8", "link": "inter"}, "no link inter: gemm is there in link None"),
        ("all_to_all", {"ranks": 8}, "all_to_all is there in link inter, intra; name one"),
        ("all_to_all", {"link": "intra"}, "all_to_all is there in ranks 2, 8; name one"),
        ("all_to_all", {"link": "intra", "ranks": 0}, "0 ranks; expected at least 1"),
        ("all_to_all", {"link": "intra", "ranks": 2}, "a size of m, n; expected bytes"),
    ],
)
def test_what_cannot_be_answered_is_told_with_what_there_is(case: str, asked: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        predict(BOTH, case, {"m": 1, "n": 2}, **asked)  # type: ignore[arg-type]


def test_sizes_that_lack_an_axis_of_their_case_are_refused() -> None:
    fit = fit_arrays({"m": np.array([8, 64])}, np.array([8.0, 64.0]), np.array([1e-5, 1e-4]))
    for case in ("gemm", "moe"):
        forged = Series(case=case, dtype="fp8", ranks=1, unit="macs", fit=fit)
        with pytest.raises(InputError, match=f"sizes of {case} over m lack"):
            predicted(forged, {"m": 8})


def test_where_there_are_no_fits_it_is_said() -> None:
    unfitted = BOTH.series["all_to_all/uint8@8/inter"].model_copy(update={"fit": None})
    with pytest.raises(UsageError, match="all_to_all/uint8@8/inter has no fit"):
        predicted(unfitted, {"bytes": 4096})
    with pytest.raises(UsageError, match="it has none at all"):
        predict(profile(), "gemm", {"m": 1})
