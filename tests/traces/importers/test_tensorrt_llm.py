"""TensorRT-LLM's statistics: sums over ranks by iteration and layer, and everything that must be refused.

Legend: R ranks; B iterations; L MoE layers; E experts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.traces.count_form import read_counts
from moeplan.traces.importers import tensorrt_llm
from tests.traces.importers.recordings import Files, config, counts_of, imported, is_said, refused, tensorrt

LAYERS, E, K = [1, 2, 3], 6, 2


def counted(ranks: int, steps: int, layers: int = 3, experts: int = E, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 1000, (ranks, steps, layers, experts))


def stacked(trace: Path) -> Any:
    return np.stack(list(counts_of(trace).values()))


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 5), st.sets(st.integers(0, 99), min_size=1, max_size=4), st.integers(1, 5000))
def test_any_statistics_come_back_added_up_whatever_the_table(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, steps: int, layers: set[int], block_bytes: int
) -> None:
    folder, counts_RBLE = tmp_path_factory.mktemp("import"), counted(ranks, steps, len(layers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt_llm, "BLOCK_BYTES", block_bytes)
        summary = imported(folder, tensorrt(counts_RBLE, sorted(layers), K))
    np.testing.assert_array_equal(stacked(folder / "trace"), counts_RBLE.sum(axis=0))
    assert (summary.model.layer_ids, summary.model.top_k) == (tuple(sorted(layers)), K)


def test_pipeline_stages_each_give_the_layers_they_have(tmp_path: Path) -> None:
    counts_RBLE = counted(2, 3)
    files = tensorrt(counts_RBLE[:1], LAYERS, K)
    files["rank1.safetensors"] = tensorrt(counts_RBLE[1:], [7, 8, 9], K)["rank0.safetensors"]
    assert imported(tmp_path, files).model.layer_ids == (1, 2, 3, 7, 8, 9)
    np.testing.assert_array_equal(stacked(tmp_path / "trace"), np.concatenate(list(counts_RBLE), axis=1))


def test_iterations_layers_and_files_that_do_not_count_are_left_out_and_said(tmp_path: Path) -> None:
    files = tensorrt(counted(2, 3, 4), [1, 2, 3, 4], K)
    for layer in (1, 2, 3, 4):
        del files["rank1.safetensors"][f"101_{layer}"]
    files |= {"cooccurrence_rank0.safetensors": {"100_1": np.zeros((E, E), np.int64)}, "log.txt": b"so it goes"}
    summary = imported(tmp_path, files, first_step=101, config=config(4, 1, E, K))
    assert (summary.model.layer_ids, summary.model.top_k) == ((1, 2, 3), K)
    assert "layers 4 left out: beyond the hidden layers (MTP)" in summary.notes
    trace = read_counts(tmp_path / "trace")
    assert (set(trace.known), trace.meta.step_order) == ({"step"}, "known")
    assert is_said(summary, "ranks 0-1 added up")
    assert list(counts_of(tmp_path / "trace")) == [102]
    assert is_said(summary, "1 iterations left out, which not all ranks recorded")
    assert "1 other files left out: log.txt" in summary.notes


Edit = Callable[[Files], Any]


def tensor(name: str, value: Any) -> Edit:
    """Set a tensor of rank 1."""
    return lambda files: files["rank1.safetensors"].update({name: value})


def told(**changes: Any) -> Edit:
    return lambda files: files["meta_info.json"].update(changes)


ROW = np.ones(E, np.int64)
MALFORMED: dict[str, tuple[Edit, str]] = {
    "no description": (lambda files: files.pop("meta_info.json"), "0 meta_info.json and 2 rank*.safetensors"),
    "no ranks": (lambda files: [files.pop(f"rank{rank}.safetensors") for rank in (0, 1)], "1 meta_info.json and 0 "),
    "ranks missing": (lambda files: files.update({"rank7.safetensors": {"100_1": ROW}}), "ranks 0-1, 7 and not 2-6"),
    "a rank twice": (
        lambda files: files.update({"rank01.safetensors": files["rank1.safetensors"]}),
        "rank 1 for the second time: counted double",
    ),
    "experts in words": (told(num_experts="6"), "expected num_experts and num_experts_per_token"),
    "absurdly many experts": (told(num_experts=2**31), "expected num_experts and num_experts_per_token"),
    "more choices than experts": (told(num_experts_per_token=7), "with 6 experts, top-7"),
    "other experts": (told(num_experts=7), "tensor '100_1' is I64 [6]; expected iteration_layer, I64 [7]"),
    "a description of nothing": (
        lambda files: files.update({"meta_info.json": b'{"num_experts_per_token"'}),
        "not the description of statistics",
    ),
    "a description with NaN": (
        lambda files: files.update({"meta_info.json": b'{"num_experts_per_token": NaN}'}),
        "NaN is not a finite number",
    ),
    "floats": (tensor("100_1", ROW * 1.5), "tensor '100_1' is F64 [6]"),
    "a matrix": (tensor("100_1", np.ones((E, E), np.int64)), "tensor '100_1' is I64 [6, 6]"),
    "another name": (tensor("100_x", ROW), "tensor '100_x' is I64 [6]; expected iteration_layer"),
    "a zero before a name": (tensor("0100_1", ROW), "tensor '0100_1' is I64 [6]; expected iteration_layer"),
    "a name below 0": (tensor("-1_1", ROW), "rank1.safetensors is damaged or of another kind than"),
    "an absurd iteration": (tensor(f"{10**12}_1", ROW), "tensor '1000000000000_1'"),
    "a layer of some iterations": (tensor("100_9", ROW), "10 tensors of 3 iterations and 4 layers"),
    "a negative count": (tensor("100_1", -ROW), "rank1.safetensors: 100_1: count -1; expected 0"),
    "an absurd count": (tensor("100_1", ROW << 62), "rank1.safetensors: 100_1: count 4611686018427387904"),
    "no common iteration": (
        lambda files: files.update({"rank1.safetensors": {f"7_{layer}": ROW for layer in LAYERS}}),
        "no iterations that all 2 ranks recorded",
    ),
    "a file cut off": (
        lambda files: files.update({"rank1.safetensors": (200).to_bytes(8, "little") + b'{"100_1":{"dtype":"I64"'}),
        "rank1.safetensors: damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_statistics_are_one_clear_line_and_leave_nothing(tmp_path: Path, name: str) -> None:
    edit, expected = MALFORMED[name]
    files = tensorrt(counted(2, 3), LAYERS, K)
    edit(files)
    refused(tmp_path, files, expected)
