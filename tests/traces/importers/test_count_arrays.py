"""The importer of count arrays: both layouts come back cell by cell, and everything it must refuse."""

import io
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeplan.errors import UsageError
from moeplan.traces.count_form import read_counts
from moeplan.traces.importers import count_arrays, import_trace
from tests.traces.importers.recordings import cells_of, imported, npz, refused

KINDS = st.sampled_from([np.uint8, np.uint16, np.int32, np.int64, np.uint64])


@settings(max_examples=25, deadline=None)
@given(st.data(), KINDS)
def test_counts_by_sample_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: type) -> None:
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4)))
    counts = data.draw(hnp.arrays(kind, shape, elements=st.integers(0, 200)))
    folder = tmp_path_factory.mktemp("import")
    summary = imported(folder, {"c.npz": npz(counts=counts, other=np.arange(3))}, top_k=1)
    assert cells_of(folder / "trace") == {at: count for at, count in np.ndenumerate(counts) if count}
    (pairs, *others) = counts.sum(axis=(0, 2), dtype=np.int64).tolist()
    num_tokens = pairs if all(other == pairs for other in others) else None
    assert (summary.num_tokens, summary.num_samples, summary.is_counts) == (num_tokens, shape[0], True)
    assert (summary.model.num_experts, summary.notes) == (shape[2], ("array other left out",))


@settings(max_examples=25, deadline=None)
@given(st.data(), KINDS, st.integers(1, 4096))
def test_counts_by_step_come_back_whatever_the_block(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: type, block_bytes: int
) -> None:
    shape = data.draw(st.tuples(*[st.integers(1, 3)] * 5))
    counts = data.draw(hnp.arrays(kind, shape, elements=st.integers(0, 200)))
    steps = data.draw(hnp.arrays(np.int64, shape[0], elements=st.integers(-5, 10**6), unique=True))
    folder = tmp_path_factory.mktemp("import")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count_arrays, "BLOCK_BYTES", block_bytes)
        summary = imported(folder, {"c.npz": npz(counts=counts, iteration=steps)}, top_k=1)
    assert summary.num_samples == shape[0] * shape[1] * shape[3]
    _, ranks, _, micro, _ = shape
    assert cells_of(folder / "trace") == {
        (int(steps[b]), (b * ranks + r) * micro + m, r, layer, expert): count
        for (b, r, layer, m, expert), count in np.ndenumerate(counts)
        if count
    }


@pytest.mark.parametrize(("told", "top_k", "num_tokens"), [({"n_tokens": np.full(4, 6)}, 2, 24), ({}, 1, None)])
def test_the_experts_a_token_follow_from_the_tokens_of_a_sample_where_they_are_known(
    tmp_path: Path, told: dict[str, Any], top_k: int, num_tokens: int | None
) -> None:
    files = {"c.npz": npz(counts=np.full((4, 2, 3), 4), **told)}
    summary = imported(tmp_path, files)
    assert (summary.model.top_k, summary.num_tokens, summary.num_samples) == (top_k, num_tokens, 4)
    if told:
        refused(tmp_path, files, "top_k 3 asked for; the file says 2", kind=UsageError, to="other", top_k=3)


COUNTS = np.ones((4, 2, 3), np.int64)
BY_STEP = np.ones((2, 2, 1, 1, 3), np.int64)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"counts": np.ones((4, 2, 3))}, "counts is float64 "),
        ({"counts": np.ones((4, 0, 3), int)}, "(4, 0, 3); expected integers"),
        ({"counts": -COUNTS}, "count -1; expected 0 to"),
        ({"counts": COUNTS * 2**41}, "count 2199023255552; expected 0 to"),
        ({"counts": np.ones((1, 5000, 1), int)}, "at most 4,096 layers"),
        ({"counts": np.ones((1, 1, 65_535), int)}, "65,534 experts"),
        ({"counts": COUNTS, "n_tokens": np.ones(3, int)}, "n_tokens is int64 (3,); expected integers of shape (4,"),
        ({"counts": COUNTS, "n_tokens": np.full(4, 2)}, "sample 0 has 2 tokens and 3 to 3 counts a layer"),
        ({"counts": COUNTS, "n_tokens": np.array([1, 1, 0, 1])}, "sample 2 has 0 tokens"),
        ({"counts": BY_STEP}, "5 dimensions without iteration"),
        ({"counts": BY_STEP, "iteration": np.array([7, 7])}, "names a step twice"),
        ({"counts": BY_STEP, "iteration": np.array([7, 2**40])}, "expected int32"),
        ({"counts": BY_STEP, "iteration": np.array([7, -(2**40)])}, "expected int32"),
        ({"counts": BY_STEP, "iteration": np.array([7.0, 8.0])}, "iteration is float64"),
    ],
)
def test_arrays_of_another_layout_are_refused_in_one_line(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    refused(tmp_path, {"c.npz": npz(**arrays)}, message)


def test_an_archive_that_names_an_array_twice_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO(npz(counts=COUNTS))
    with zipfile.ZipFile(stream, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr("counts.npy", archive.read("counts.npy"))
    refused(tmp_path, {"c.npz": stream.getvalue()}, "c.npz: two arrays called counts; expected one of each name")


def test_a_damaged_archive_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = npz(counts=BY_STEP, iteration=np.arange(2))
    for end in range(8, len(whole) - 1, 37):
        refused(tmp_path, {"d.npz": whole[:end]})


def test_the_real_counts_are_imported(tmp_path: Path, real_data: Path) -> None:
    source = real_data / "olmoe-1b-7b" / "per_sample_counts.npz"
    if not source.is_file():
        pytest.skip(f"real counts absent: {source}")
    model = import_trace(source, tmp_path / "olmoe").model
    assert (model.num_layers, model.num_experts, model.top_k) == (16, 64, 8)
    with np.load(source) as data:
        expected = data["counts"].astype(np.int64)
    found = np.concatenate([table.counts for table in read_counts(tmp_path / "olmoe").tables()])
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)
