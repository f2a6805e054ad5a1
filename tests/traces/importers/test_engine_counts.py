"""SGLang's and TensorRT-LLM's counts by step: they come back in order, and everything that must be refused.

Legend: R ranks; B steps; H hidden layers; L MoE layers; E experts.
"""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError, UsageError
from moeplan.traces.count_form import read_counts
from moeplan.traces.importers import import_trace, tensorrt_llm
from moeplan.traces.importers.sglang import ring_order
from moeplan.traces.importers.torch_file import check_pickle
from tests.traces.importers.recordings import (
    Files,
    config,
    counts_of,
    imported,
    is_said,
    on_disk,
    refused,
    stat,
    tensorrt,
)

H, E = 4, 6
NAME = "expert_distribution_recorder_1763.25.pt"


def counts(num_steps: int, num_hidden: int = H, num_experts: int = E, dense: int = 1, seed: int = 0) -> Any:
    """Counts `[B, H, E]`, none of an MoE layer zero, and dense layers all zero."""
    counts_BHE = np.random.default_rng(seed).integers(1, 1000, (num_steps, num_hidden, num_experts))
    counts_BHE[:, :dense] = 0
    return counts_BHE


def test_the_fixture_is_tagged_as_of_a_gpu(tmp_path: Path) -> None:
    path = on_disk(tmp_path, stat(counts(3), rows=5, begin=0))
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path, weights_only=True)
    import_trace(path, tmp_path / "trace")


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(0, 8), st.integers(0, 16), st.booleans())
def test_any_ring_comes_back_without_dense_layers_in_order_where_it_has_one(
    tmp_path_factory: pytest.TempPathFactory, steps: int, unused: int, begin: int, known: bool
) -> None:
    folder, counts_BHE, rows = tmp_path_factory.mktemp("import"), counts(steps), steps + unused
    ring = stat(counts_BHE, rows=rows, begin=begin % rows)
    summary = imported(folder, ring, config=config(H, 1, E, 2) if known else None, top_k=2)
    assert (summary.model.layer_ids, summary.model.hidden_size) == ((1, 2, 3), 64 if known else None)
    assert is_said(summary, f"{unused} unused rows of {rows} left out") == (unused > 0)
    found = [counts_LE.tolist() for counts_LE in counts_of(folder / "trace").values()]
    expected = counts_BHE[:, 1:].tolist()
    assert found == expected if unused else sorted(found) == sorted(expected)
    assert read_counts(folder / "trace").meta.step_order == ("known" if unused else "unknown")


def test_the_order_of_a_ring_is_that_of_a_walk_from_its_one_gap() -> None:
    for bits in range(1, 2**7):
        used = np.array([bits >> place & 1 for place in range(7)], np.bool_)
        rows, is_known = ring_order(used)
        gaps = sum(used[place] and not used[place - 1] for place in range(7))
        assert is_known == (gaps == 1)
        assert sorted(rows.tolist()) == np.flatnonzero(used).tolist()
        if is_known:
            walked = next(place for place in range(7) if used[place] and not used[place - 1])
            assert rows.tolist() == [(walked + step) % 7 for step in range(used.sum())]


def test_without_the_config_layers_that_count_nothing_are_left_out_and_named(tmp_path: Path) -> None:
    summary = imported(tmp_path, stat(counts(3), rows=5, begin=4))
    assert summary.model.layer_ids == (1, 2, 3)
    assert is_said(summary, "hidden layers 0 count nothing: taken for dense")
    assert is_said(summary, "1 taken")


def test_warm_up_is_left_out_where_the_order_is_known_and_else_refused(tmp_path: Path) -> None:
    ring = stat(counts(5), rows=9, begin=6)
    summary = imported(tmp_path, ring, first_step=2)
    assert list(counts_of(tmp_path / "trace")) == [2, 3, 4]
    assert is_said(summary, "6 rows of steps before 2 left out")
    refused(tmp_path, ring, "nothing was recorded since step 9", to="other", first_step=9)
    told, unordered = "first step 2 asked for; in which order", stat(counts(5), rows=5, begin=0)
    refused(tmp_path, unordered, told, kind=UsageError, to="other", first_step=2)


class Code:
    """What pickle runs when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("true",))


def dump(**changes: Any) -> dict[str, Any]:
    (whole,) = stat(counts(3), rows=5, begin=0).values()
    return {name: value for name, value in (whole | changes).items() if value is not None}


def tensor(*shape: int, kind: Any = torch.int32) -> torch.Tensor:
    return torch.ones(shape, dtype=kind)


COUNTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: [[[1]]], "logical_count is list; expected a tensor of integers"),
    (lambda: tensor(4, 6), "logical_count is torch.int32 (4, 6)"),
    (lambda: tensor(2, 2, 2, 2), "of 3 dimensions"),
    (lambda: tensor(3, 4, 6, kind=torch.float32), "torch.float32 (3, 4, 6)"),
    (lambda: tensor(3, 4, 6).to_sparse(), "_rebuild_sparse_tensor"),
    (lambda: tensor(3, 4, 6).to("meta"), "_rebuild_meta_tensor_no_storage"),
    (lambda: tensor(3).untyped_storage(), "GLOBAL torch.storage.UntypedStorage"),
    (lambda: -tensor(3, 4, 6), "logical_count: count -1; expected 0 to"),
    (lambda: 2**62 * tensor(3, 4, 6, kind=torch.int64), "count 46116860"),
    (lambda: tensor(0, 4, 6), "of shape (0, 4, 6)"),
    (lambda: tensor(3, 4, 0), "of shape (3, 4, 0)"),
    (lambda: tensor(1, 5000, 1), "at most 4,096 layers"),
    (lambda: tensor(1, 1, 65535), "65,534 experts"),
    (lambda: 0 * tensor(3, 4, 6), "nothing is counted in any layer"),
    (lambda: tensor(1, 1, 1).expand(10**6, 4000, 60), "is larger than its bytes in the file"),
]
MALFORMED: list[tuple[Callable[[], Any], str]] = [
    (lambda: dump(extra=Code()), "needs more than tensors and plain values (GLOBAL posix.system)"),
    (lambda: (dump(),), "neither logical_count nor records"),
    (lambda: {"weights": tensor(3)}, "neither logical_count nor records"),
    *((lambda make=make: dump(logical_count=make()), said) for make, said in COUNTS),
]


@pytest.mark.parametrize(("make", "said"), MALFORMED)
def test_a_malformed_dump_is_one_line_and_leaves_nothing(tmp_path: Path, make: Callable[[], Any], said: str) -> None:
    refused(tmp_path, {NAME: make()}, said)


def shared(make: Any, depth: int = 60) -> Any:
    """A value that is short in a pickle and, told apart, longer than any memory."""
    value = make((1, 2))
    for _ in range(depth):
        value = make((value, value))
    return value


def reduced(module: str, name: str, arguments: bytes) -> bytes:
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + arguments + b"\x85R."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (reduced("builtins", "bytearray", b"J\xff\xff\xff\x7f"), r"GLOBAL builtins\.bytearray"),
        (reduced("torch._utils", "_rebuild_parameter", b"N"), r"GLOBAL torch\._utils\._rebuild_parameter"),
        (b"\x80\x02ccollections\nOrderedDict\n)R}X\x04\x00\x00\x00keysK\x01sb.", r"\(BUILD\)"),
        (pickle.dumps({1: shared(tuple)}, 2), "refers to a tuple, list or object a second time"),
        (pickle.dumps([{}] * 2, 2), "refers to a tuple, list or object a second time"),
        (b"\x80\x02]q\x00q\x01h\x01\x86.", "a second time"),
        (pickle.dumps({k * (2**61 - 1): k for k in range(1, 9)}, 2), "a number out of all range"),
    ],
)
def test_what_costs_more_than_its_bytes_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_pickle(data)


LAYERS, K = [1, 2, 3], 2


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


def put(name: str, value: Any) -> Edit:
    """Set a tensor of rank 1."""
    return lambda files: files["rank1.safetensors"].update({name: value})


def described(**changes: Any) -> Edit:
    return lambda files: files["meta_info.json"].update(changes)


ROW = np.ones(E, np.int64)
FAULTS: dict[str, tuple[Edit, str]] = {
    "no description": (lambda files: files.pop("meta_info.json"), "0 meta_info.json and 2 rank*.safetensors"),
    "no ranks": (lambda files: [files.pop(f"rank{rank}.safetensors") for rank in (0, 1)], "1 meta_info.json and 0 "),
    "ranks missing": (lambda files: files.update({"rank7.safetensors": {"100_1": ROW}}), "ranks 0-1, 7 and not 2-6"),
    "a rank twice": (
        lambda files: files.update({"rank01.safetensors": files["rank1.safetensors"]}),
        "rank 1 for the second time: counted double",
    ),
    "experts in words": (described(num_experts="6"), "expected num_experts and num_experts_per_token"),
    "absurdly many experts": (described(num_experts=2**31), "expected num_experts and num_experts_per_token"),
    "more choices than experts": (described(num_experts_per_token=7), "with 6 experts, top-7"),
    "other experts": (described(num_experts=7), "tensor '100_1' is I64 [6]; expected iteration_layer, I64 [7]"),
    "a description of nothing": (
        lambda files: files.update({"meta_info.json": b'{"num_experts_per_token"'}),
        "not the description of statistics",
    ),
    "a description with NaN": (
        lambda files: files.update({"meta_info.json": b'{"num_experts_per_token": NaN}'}),
        "NaN is not a finite number",
    ),
    "floats": (put("100_1", ROW * 1.5), "tensor '100_1' is F64 [6]"),
    "a matrix": (put("100_1", np.ones((E, E), np.int64)), "tensor '100_1' is I64 [6, 6]"),
    "another name": (put("100_x", ROW), "tensor '100_x' is I64 [6]; expected iteration_layer"),
    "a zero before a name": (put("0100_1", ROW), "tensor '0100_1' is I64 [6]; expected iteration_layer"),
    "a name below 0": (put("-1_1", ROW), "rank1.safetensors is damaged or of another kind than"),
    "an absurd iteration": (put(f"{10**12}_1", ROW), "tensor '1000000000000_1'"),
    "a layer of some iterations": (put("100_9", ROW), "10 tensors of 3 iterations and 4 layers"),
    "a negative count": (put("100_1", -ROW), "rank1.safetensors: 100_1: count -1; expected 0"),
    "an absurd count": (put("100_1", ROW << 62), "rank1.safetensors: 100_1: count 4611686018427387904"),
    "no common iteration": (
        lambda files: files.update({"rank1.safetensors": {f"7_{layer}": ROW for layer in LAYERS}}),
        "no iterations that all 2 ranks recorded",
    ),
    "a file cut off": (
        lambda files: files.update({"rank1.safetensors": (200).to_bytes(8, "little") + b'{"100_1":{"dtype":"I64"'}),
        "rank1.safetensors: damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_malformed_statistics_are_one_clear_line_and_leave_nothing(tmp_path: Path, name: str) -> None:
    edit, expected = FAULTS[name]
    files = tensorrt(counted(2, 3), LAYERS, K)
    edit(files)
    refused(tmp_path, files, expected)
