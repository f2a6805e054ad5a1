"""Which series predicts a case, and what is said where none does."""

import dataclasses

import numpy as np
import pytest

from moeplan.errors import InputError, UsageError
from moeplan.profilers.cases import CASES
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.fits.fitting import fit_arrays, fit_series
from moeplan.profilers.fits.piecewise import Piecewise
from moeplan.profilers.measurement import Measurement
from moeplan.profilers.origin import Origin, now
from moeplan.profilers.predictor import predict, predicted
from moeplan.profilers.profile import Profile
from moeplan.profilers.series import Series
from tests.builders import known, series

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
        found = predict(BOTH, "all_to_all", {"bytes": 4096}, ranks=ranks, link=link)  # type: ignore[arg-type]
        assert found.seconds == pytest.approx(4096 * (ranks - 1) / ranks * s_per_byte)
        assert not found.extrapolated


def test_a_series_predicts_what_the_profile_predicts_by_its_name() -> None:
    one, size = BOTH.series["all_to_all/uint8@8/inter"], {"bytes": [4096, 8192]}
    asked = predict(BOTH, "all_to_all", size, ranks=8, link="inter")
    assert predicted(one, size).seconds.tolist() == asked.seconds.tolist()
    with pytest.raises(UsageError, match="a size of m; expected bytes"):
        predicted(one, {"m": 1})
    with pytest.raises(UsageError, match="all_to_all/uint8@8/inter has no fit"):
        predicted(one.model_copy(update={"fit": None}), size)


def test_a_pair_is_predicted_by_its_bytes_alone() -> None:
    pairs = [
        Measurement.of({"bytes": n, "first": 0, "second": peer}, n, [1e-9 * n] * 6)
        for n in (64, 1024, 4096)
        for peer in (1, 2, 3)
    ]
    fit = fit_series(CASES["point_to_point"], 2, pairs)
    one = Series(case="point_to_point", dtype="uint8", ranks=2, link="intra", unit="bytes", fit=fit)
    assert predict(profile(one), "point_to_point", {"bytes": 2048}).seconds == pytest.approx(2.048e-6)


def test_bytes_are_bytes_in_any_dtype() -> None:
    found = predict(BOTH, "all_to_all", {"bytes": 4096}, dtype="bf16", ranks=2, link="intra")
    assert found.seconds == pytest.approx(2048e-9)


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


def test_a_fit_that_gives_no_time_is_refused_where_it_is_asked() -> None:
    steep = series("all_to_all", 4, "intra")
    model = Piecewise(works=(1.0, 1.0 + 1e-15), seconds_at=(1e-12, 8e4), kind="piecewise_linear")
    forged = steep.model_copy(update={"fit": dataclasses.replace(known(steep.fit), model=model)})
    with pytest.raises(InputError, match="predicts no time that means anything"):
        predicted(forged, {"bytes": 2**60})


def test_sizes_that_lack_an_axis_of_their_case_are_refused() -> None:
    fit = fit_arrays({"m": np.array([8, 64])}, np.array([8.0, 64.0]), np.array([1e-5, 1e-4]))
    for case in ("gemm", "moe"):
        forged = Series(case=case, dtype="fp8", ranks=1, unit="macs", fit=fit)
        with pytest.raises(InputError, match=f"sizes of {case} over m lack"):
            predicted(forged, {"m": 8})


def test_a_profile_without_fits_says_so() -> None:
    with pytest.raises(UsageError, match="it has none at all"):
        predict(profile(), "gemm", {"m": 1})
