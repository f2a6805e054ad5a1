"""Presets: profiles that ship in the wheel, held against the tables they were made from and against the data sheets."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.make_presets import DTYPES, TABLES, attention, preset_of
from moeplan.errors import UsageError
from moeplan.profilers import profile as profiles
from moeplan.profilers.description import on_cluster
from moeplan.profilers.fits import fitting
from moeplan.profilers.predictor import predict, predicted
from moeplan.profilers.presets import PRESETS, load_preset
from moeplan.profilers.presets.preset import file_name
from moeplan.profilers.profile import Profile
from moeplan.profilers.tables import collectives, kernels, read_tables
from tests.builders import known

MOST_BYTES = 400_000
ELEMENTS = {"bf16": 2, "fp8": 1}
FOLDER = files("moeplan.profilers.presets")
TOKENS = np.unique(np.geomspace(1, 2**17, 120).astype(np.int64))
LAYERS = ((2880, 2880), (4096, 1536), (7168, 2048), (2048, 768))  # gpt-oss, Qwen3, DeepSeek-V3
PARTS = [f"{case}/{dtype}" for case in ("expert_ffn", "gemm", "attention") for dtype in ("bf16", "fp8")]
PARTS += [f"{case}/uint8@{ranks}/intra" for case in ("all_to_all", "all_gather") for ranks in (2, 4, 8)]


@pytest.fixture(scope="module", params=sorted(PRESETS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def preset(name: str) -> Profile:
    return load_preset(name)


def test_a_preset_has_what_times_a_step_in_bf16_and_fp8_and_fits_into_400_kb(
    name: str, preset: Profile, tmp_path: Path
) -> None:
    assert 100_000 < len(FOLDER.joinpath(file_name(name)).read_bytes()) <= MOST_BYTES
    assert {*PARTS} <= {key for key, series in preset.series.items() if series.fit}
    assert (str(preset.cluster), [*preset.cluster.links]) == ("1x8", ["intra"])
    profiles.save(preset, tmp_path / "profile.json")
    assert profiles.load(tmp_path / "profile.json") == preset


def test_source_licence_and_the_roofline_are_named_in_the_origins_and_in_the_notice(preset: Profile) -> None:
    tables, roofline = preset.origins
    assert (tables.kind, TABLES in known(tables.name)) == ("tables", True)
    assert (roofline.kind, "roofline, not measured" in known(roofline.name)) == ("described", True)
    assert {key for key, series in preset.series.items() if series.origin == 1} == {"attention/bf16", "attention/fp8"}
    notice = FOLDER.joinpath("NOTICE").read_text()
    assert all(word in notice for word in ("ai-dynamo/aiconfigurator", "095f58a", "NVIDIA", "Apache License"))


def test_the_file_has_the_roofline_of_the_data_sheet(name: str, preset: Profile) -> None:
    for dtype in ("bf16", "fp8"):
        stored = preset.series[f"attention/{dtype}"]
        assert stored == attention(PRESETS[name], dtype, origin=1)
        sheet = PRESETS[name]
        least = {"batch": 0, "length": 1, "hidden": 4096, "q": 4096, "kv": 8192, "queries": 1}
        weights_s = ELEMENTS[dtype] * 4 * 4096**2 / (0.8 * sheet.bytes_per_s)
        assert predicted(stored, least).seconds == pytest.approx(weights_s)


def test_an_unknown_preset_is_answered_with_those_there_are() -> None:
    for wrong in ("h300", "", "../h100_sxm", "list"):
        with pytest.raises(UsageError, match="there are h100_sxm, h200_sxm"):
            load_preset(wrong)


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp8_block"])
def test_no_expert_layer_is_faster_than_its_data_sheet_and_more_tokens_save_at_most_a_fifth(
    name: str, preset: Profile, dtype: str
) -> None:
    width, flops = (2, "bf16") if dtype == "bf16" else (1, "fp8")
    for hidden, ffn in LAYERS:
        for experts in (1, 2, 4, 8, 32, 128):
            size: dict[str, Any] = {"tokens": TOKENS, "experts": experts, "hidden": hidden, "ffn": ffn, "grouped": 1}
            seconds = predict(preset, "expert_ffn", size, dtype=dtype).seconds
            read_s = np.minimum(TOKENS, experts) * 3 * hidden * ffn * width / PRESETS[name].bytes_per_s
            compute_s = 6 * TOKENS * hidden * ffn / PRESETS[name].flops[flops]
            assert (seconds > np.maximum(read_s, compute_s)).all()
            assert (seconds < 15 * np.maximum(read_s, compute_s) + 1e-4).all()
            assert (seconds >= 0.8 * np.maximum.accumulate(seconds)).all()


def test_exchanges_never_take_less_time_for_more_bytes_nor_pass_the_port(preset: Profile) -> None:
    num_bytes = np.unique(np.geomspace(512, 2**30, 200).astype(np.int64))
    for case in ("all_to_all", "all_gather"):
        for ranks in (2, 4, 8):
            seconds = predict(preset, case, {"bytes": num_bytes}, ranks=ranks).seconds
            assert (np.diff(seconds) >= 0).all()
            assert (num_bytes * (ranks - 1) / ranks / seconds < 450e9).all()  # NVLink in one direction


def test_a_node_of_another_width_takes_its_own_exchange_and_the_link_between_nodes_is_as_given(
    preset: Profile,
) -> None:
    placed = on_cluster(preset, "2x4", ["inter=50:5"])
    line = known(preset.series["all_to_all/uint8@4/intra"].fit).alpha_beta
    assert placed.cluster.links["intra"].s_per_byte == pytest.approx(line.b_s)
    assert placed.cluster.links["intra"] != preset.cluster.links["intra"]
    assert placed.cluster.links["inter"].s_per_byte == pytest.approx(1 / 50e9)
    assert (str(placed.cluster), placed.series) == ("2x4", preset.series)
    kinds = [placed.origins[at].kind for at in (placed.link_origins["intra"], placed.link_origins["inter"])]
    assert kinds == ["tables", "described"]
    assert known(placed.origins[-1].name) == "cluster 2x4 and link inter=50:5"


def test_a_link_given_replaces_the_curves_that_crossed_it(preset: Profile) -> None:
    placed = on_cluster(preset, None, ["intra=200:3"])
    assert placed.cluster.links["intra"].s_per_byte == pytest.approx(1 / 200e9)
    assert not [key for key, series in placed.series.items() if series.link == "intra"]
    assert placed.series["expert_ffn/bf16"] == preset.series["expert_ffn/bf16"]
    assert on_cluster(preset, None) == preset
    assert on_cluster(preset, "1x1").cluster.links == {}
    assert on_cluster(preset, "3x6", ["intra=200:3", "inter=50:5"]).cluster.num_devices == 18


@pytest.mark.parametrize(
    ("cluster", "links", "told"),
    [
        ("2x8", [], "for example --link inter=50:5 for 400 Gb/s InfiniBand"),
        ("2x8", ["intra=400:3"], "give the link between nodes as --link inter="),
        ("1x6", [], "no all-to-all of 6 devices in h.00_sxm, which has 2, 4, 8"),
        ("1x8", ["inter=50:5"], "expected two or more nodes"),
        ("8", [], "expected NxG"),
    ],
)
def test_a_link_that_is_neither_given_nor_measured_is_asked_for_in_one_line(
    preset: Profile, cluster: str, links: list[str], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        on_cluster(preset, cluster, links)


def test_at_every_table_point_of_what_is_kept_a_preset_is_within_2_percent_of_the_tables(
    name: str, preset: Profile, real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = real_data / "gpu-measurements"
    if not (folder / name).is_dir():
        pytest.skip(f"published tables absent: {folder / name}")
    sizes_of_fit: dict[int, Any] = {}

    def noted(size: Any, works: Any, seconds: Any) -> Any:
        fit = fitting.fit_arrays(size, works, seconds)
        sizes_of_fit[id(fit)] = size
        return fit

    def noted_series(case: Any, ranks: int, measurements: Any) -> Any:
        fit = fitting.fit_series(case, ranks, measurements)
        sizes_of_fit[id(fit)] = {"bytes": np.array([one.size["bytes"] for one in measurements])}
        return fit

    monkeypatch.setattr(kernels, "fit_arrays", noted)
    monkeypatch.setattr(collectives, "fit_arrays", noted)
    monkeypatch.setattr(collectives, "fit_series", noted_series)
    tables = read_tables(folder, name)
    kept = {key: series for key, series in tables.series.items() if series.dtype in DTYPES}
    assert {*kept} == {key for key, series in preset.series.items() if series.origin == 0}
    num_points = 0
    for key, series in kept.items():
        size = sizes_of_fit[id(series.fit)]
        found, expected = predicted(preset.series[key], size), predicted(series, size)
        assert np.abs(found.seconds / expected.seconds - 1).max() <= 0.02, key
        assert (found.extrapolated == expected.extrapolated).all()
        num_points += len(found.seconds)
    assert num_points > 100_000
    made = preset_of(tables, PRESETS[name])
    assert ({*made.series}, made.cluster) == ({*preset.series}, preset.cluster)
    assert made.origins[0].name == preset.origins[0].name  # the file was made from the tables that are newest today
