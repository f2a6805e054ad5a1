"""SGLang's counts by step: rings however rotated come back in order, and everything that must be refused.

Legend: B steps; H hidden layers; E experts.
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
from moeplan.traces.importers import import_trace
from moeplan.traces.importers.sglang import ring_order
from moeplan.traces.importers.torch_file import check_pickle
from tests.traces.importers.recordings import config, counts_of, imported, is_said, on_disk, refused, stat

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
