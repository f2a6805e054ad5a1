"""SGLang's counts by step: rings however rotated come back in order, and everything that must be refused.

Legend: B steps; H hidden layers; E experts.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError, MismatchError, UsageError
from moeplan.traces.count_form import read_counts
from moeplan.traces.importers import import_trace
from moeplan.traces.importers.sglang_stat import ring_order
from tests.traces.importers.recordings import assert_refused, config, counts_of, stat, write

H, E = 4, 6
NAME = "expert_distribution_recorder_1763.25.pt"


def counts(num_steps: int, num_hidden: int = H, num_experts: int = E, dense: int = 1, seed: int = 0) -> Any:
    """Counts `[B, H, E]`, none of an MoE layer zero, and dense layers all zero."""
    found = np.random.default_rng(seed).integers(1, 1000, (num_steps, num_hidden, num_experts))
    found[:, :dense] = 0
    return found


def test_a_rotated_ring_of_real_size_comes_back_in_order_without_its_dense_layers(tmp_path: Path) -> None:
    counts_BHE = counts(60, 61, 256, dense=3)
    folder = write(tmp_path / "in", stat(counts_BHE, rows=100, begin=73))
    write(tmp_path, {"config.json": config(61, 3, 256, 8)})
    summary = import_trace(folder / NAME, tmp_path / "trace", hf_config=tmp_path / "config.json")
    found = counts_of(tmp_path / "trace")
    assert list(found) == list(range(60))
    np.testing.assert_array_equal(np.stack(list(found.values())), counts_BHE[:, 3:])
    trace = read_counts(tmp_path / "trace")
    assert (trace.meta.step_order, set(trace.known)) == ("known", {"step"})
    assert trace.meta.model.layer_ids == tuple(range(3, 61))
    model = summary.model
    assert (model.num_experts, model.top_k, model.num_hidden_layers, model.hidden_size) == (256, 8, 61, 64)
    assert any("40 unused rows of 100 left out" in note for note in summary.notes)
    assert any("requests and source ranks are unknown" in note for note in summary.notes)


def test_the_fixture_is_tagged_as_of_a_gpu(tmp_path: Path) -> None:
    path = write(tmp_path, stat(counts(3), rows=5, begin=0)) / NAME
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path, weights_only=True)
    import_trace(path, tmp_path / "trace")


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(0, 8), st.integers(0, 16), st.booleans())
def test_any_ring_comes_back_in_order_where_it_has_one(
    tmp_path_factory: pytest.TempPathFactory, steps: int, unused: int, begin: int, known: bool
) -> None:
    folder = tmp_path_factory.mktemp("import")
    counts_BHE, rows = counts(steps), steps + unused
    write(folder, {**stat(counts_BHE, rows=rows, begin=begin % rows), "config.json": config(H, 1, E, 2)})
    import_trace(folder / NAME, folder / "trace", hf_config=folder / "config.json" if known else None, top_k=2)
    found = [counts_LE.tolist() for counts_LE in counts_of(folder / "trace").values()]
    expected = counts_BHE[:, 1:].tolist()
    if unused:
        assert found == expected
    else:
        assert sorted(found) == sorted(expected)
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
    path = write(tmp_path, stat(counts(3), rows=5, begin=4)) / NAME
    summary = import_trace(path, tmp_path / "trace")
    assert summary.model.layer_ids == (1, 2, 3)
    assert any(note.startswith("hidden layers 0 count nothing: taken for dense") for note in summary.notes)
    assert any("1 taken" in note for note in summary.notes)


def test_warm_up_is_left_out_where_the_order_is_known_and_else_refused(tmp_path: Path) -> None:
    path = write(tmp_path, stat(counts(5), rows=9, begin=6)) / NAME
    summary = import_trace(path, tmp_path / "trace", first_step=2)
    assert list(counts_of(tmp_path / "trace")) == [2, 3, 4]
    assert any("6 rows of steps before 2 left out" in note for note in summary.notes)
    write(tmp_path, stat(counts(5), rows=5, begin=0))
    with pytest.raises(UsageError, match="first step 2 asked for; in which order"):
        import_trace(path, tmp_path / "other", first_step=2)
    with pytest.raises(InputError, match="nothing was recorded since step 9"):
        import_trace(write(tmp_path, stat(counts(5), rows=9, begin=6)) / NAME, tmp_path / "other", first_step=9)
    assert not (tmp_path / "other").exists()


class Code:
    """What pickle runs when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("true",))


def dump(**changes: Any) -> dict[str, Any]:
    (found,) = stat(counts(3), rows=5, begin=0).values()
    return {name: value for name, value in (found | changes).items() if value is not None}


def tensor(*shape: int, kind: Any = torch.int32) -> torch.Tensor:
    return torch.ones(shape, dtype=kind)


MALFORMED: dict[str, tuple[Callable[[], Any], str]] = {
    "code to be run": (lambda: dump(extra=Code()), "needs more than tensors and plain values (GLOBAL posix.system)"),
    "a list": (lambda: (dump(),), "neither logical_count nor records"),
    "a tensor alone": (lambda: tensor(3, 4, 6), "neither logical_count nor records"),
    "another dictionary": (lambda: {"weights": tensor(3)}, "neither logical_count nor records"),
    "no counts": (lambda: dump(logical_count=[[[1]]]), "logical_count is list; expected a tensor of integers"),
    "one layer's counts": (lambda: dump(logical_count=tensor(4, 6)), "logical_count is torch.int32 (4, 6)"),
    "four dimensions": (lambda: dump(logical_count=tensor(2, 2, 2, 2)), "of 3 dimensions"),
    "floats": (lambda: dump(logical_count=tensor(3, 4, 6, kind=torch.float32)), "torch.float32 (3, 4, 6)"),
    "booleans": (lambda: dump(logical_count=tensor(3, 4, 6, kind=torch.bool)), "torch.bool"),
    "complex numbers": (lambda: dump(logical_count=tensor(3, 4, 6, kind=torch.complex64)), "torch.complex64"),
    "a sparse tensor": (lambda: dump(logical_count=tensor(3, 4, 6).to_sparse()), "_rebuild_sparse_tensor"),
    "a negative count": (lambda: dump(logical_count=-tensor(3, 4, 6)), "logical_count: count -1; expected 0 to"),
    "counts past all sums": (lambda: dump(logical_count=2**62 * tensor(3, 4, 6, kind=torch.int64)), "count 46116860"),
    "no steps": (lambda: dump(logical_count=tensor(0, 4, 6)), "of shape (0, 4, 6)"),
    "no layers": (lambda: dump(logical_count=tensor(3, 0, 6)), "of shape (3, 0, 6)"),
    "no experts": (lambda: dump(logical_count=tensor(3, 4, 0)), "of shape (3, 4, 0)"),
    "absurdly many layers": (lambda: dump(logical_count=tensor(1, 5000, 1)), "at most 4,096 layers"),
    "absurdly many experts": (lambda: dump(logical_count=tensor(1, 1, 65535)), "65,534 experts"),
    "nothing counted": (lambda: dump(logical_count=0 * tensor(3, 4, 6)), "nothing is counted in any layer"),
    "few bytes that repeat without end": (
        lambda: dump(logical_count=tensor(1, 1, 1).expand(10**6, 4000, 60)),
        "is larger than its bytes in the file",
    ),
    "a meta tensor": (lambda: dump(logical_count=tensor(3, 4, 6).to("meta")), "_rebuild_meta_tensor_no_storage"),
    "a storage alone": (lambda: dump(logical_count=tensor(3).untyped_storage()), "GLOBAL torch.storage.UntypedStorage"),
    "text": (lambda: dump(logical_count="counts"), "logical_count is str"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_dump_is_one_clear_line_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    make, expected = MALFORMED[name]
    path = write(tmp_path, {NAME: make()}) / NAME
    assert_refused(path, expected)


def test_a_damaged_dump_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = (write(tmp_path, stat(counts(3), rows=5, begin=0)) / NAME).read_bytes()
    for end in range(0, len(whole), 61):
        (tmp_path / NAME).write_bytes(whole[:end])
        with pytest.raises(InputError):
            import_trace(tmp_path / NAME, tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


def test_a_pickle_of_the_old_format_is_not_loaded(tmp_path: Path) -> None:
    torch.save(dump(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(
        InputError, match=r"cut off, or a pickle or torch's format before 1\.6: loading it may run code"
    ):
        import_trace(tmp_path / "old.pt", tmp_path / "trace")


def test_two_dumps_are_not_one_recording(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", {NAME: dump(), "expert_distribution_recorder_9.5.pt": dump()})
    with pytest.raises(InputError, match=r"2 recordings of one file each .*; expected one: import each"):
        import_trace(folder, tmp_path / "trace")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 5}, "4 layers recorded; config.json has 5 hidden layers"),
        ({"first_k_dense_replace": 2}, "hidden layers 1 were routed; config.json has no experts there"),
        ({"n_routed_experts": 8}, "num_experts 6 recorded; config.json says 8"),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, {**stat(counts(3), rows=5, begin=0), "config.json": config(H, 1, E, 2) | changes})
    with pytest.raises(MismatchError, match=message):
        import_trace(tmp_path / NAME, tmp_path / "trace", hf_config=tmp_path / "config.json")
    assert not (tmp_path / "trace").exists()


def test_a_layer_with_experts_of_which_nothing_was_recorded_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {**stat(counts(3, dense=2), rows=5, begin=0), "config.json": config(H, 1, E, 2)})
    with pytest.raises(InputError, match=r"hidden layers 1 have experts by config\.json, and nothing was recorded"):
        import_trace(tmp_path / NAME, tmp_path / "trace", hf_config=tmp_path / "config.json")
