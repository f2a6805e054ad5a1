"""NVIDIA's published tables of H100 and H200: units by physics, and errors on unseen sizes held to their targets."""

from pathlib import Path

import numpy as np
import pytest

from moeplan.profilers import profile as profiles
from moeplan.profilers.fits.fit import Fit
from moeplan.profilers.predictor import predict
from moeplan.profilers.profile import Profile
from moeplan.profilers.tables import read_tables

NVLINK_BYTES_PER_S = 450e9  # of a GPU, in one direction
H200_BF16_FLOPS = 989e12


@pytest.fixture(scope="module", params=["h100_sxm", "h200_sxm"])
def profile(request: pytest.FixtureRequest, real_data: Path) -> Profile:
    folder = real_data / "gpu-measurements"
    if not (folder / request.param).is_dir():
        pytest.skip(f"published tables absent: {folder / request.param}")
    return read_tables(folder, request.param)


def fit_of(profile: Profile, key: str) -> Fit:
    found = profile.series[key].fit
    assert found is not None
    return found


def held_out_errors(profile: Profile, ranks: int) -> tuple[float, ...]:
    fit = fit_of(profile, f"all_to_all/uint8@{ranks}/intra")
    held = fit.held_out[fit.model.kind]
    assert held.num_sizes == len(held.errors) > 15  # all are listed
    return held.errors


def test_all_to_alls_of_unseen_sizes_are_off_by_5_percent_and_by_8_on_8_gpus(profile: Profile) -> None:
    pooled = [error for ranks in (2, 4, 8) for error in held_out_errors(profile, ranks)]
    assert np.median(pooled) <= 0.05
    assert np.median(held_out_errors(profile, 8)) <= 0.08
    for ranks in (2, 4, 8):
        fit = fit_of(profile, f"all_to_all/uint8@{ranks}/intra")
        assert fit.held_out[fit.model.kind].median_error < fit.held_out["alpha_beta"].median_error / 2


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 0.05), ("fp8", 0.05), ("fp8_block", 0.15)])
def test_gemms_of_unseen_layers_are_off_by_5_percent_and_by_15_in_blocks(
    profile: Profile, dtype: str, most: float
) -> None:
    fit = fit_of(profile, f"gemm/{dtype}")
    held = fit.held_out[fit.model.kind]
    assert held.num_sizes > 25_000
    assert held.median_error <= most
    assert held.p95_error < 0.2


def test_expert_layers_of_unseen_shapes_are_off_by_5_percent(profile: Profile) -> None:
    for dtype in ("bf16", "fp8", "fp8_block"):
        fit = fit_of(profile, f"moe/{dtype}")
        assert fit.held_out[fit.model.kind].median_error <= 0.05


def test_no_collective_is_faster_than_the_link_and_large_ones_come_near(profile: Profile) -> None:
    """Elements read as bytes would halve every fp16 bandwidth, and double the time of a byte in half the samples."""
    for key in ("all_to_all/uint8@8/intra", "all_gather/uint8@8/intra", "reduce_scatter/fp16@8/intra"):
        busbw = [one.work / one.median_s for one in profile.series[key].measurements]
        assert 0.6 * NVLINK_BYTES_PER_S < max(busbw) < NVLINK_BYTES_PER_S
    for one in profile.series["all_to_all/uint8@8/intra"].measurements:
        if one.size["bytes"] >= 2**24 and len(one.samples_s) > 1:
            assert one.max_s < 1.1 * one.min_s


def test_a_large_gemm_keeps_below_the_peak_of_the_device_and_above_half_of_it(profile: Profile) -> None:
    seconds = float(predict(profile, "gemm", {"m": 8192, "n": 8192, "k": 8192}, dtype="bf16").seconds)
    assert 0.5 * H200_BF16_FLOPS < 2 * 8192**3 / seconds < H200_BF16_FLOPS


def test_the_profile_is_small_and_comes_back(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profiles.save(profile, path)
    assert path.stat().st_size < 4 * 2**20
    assert profiles.load(path) == profile
