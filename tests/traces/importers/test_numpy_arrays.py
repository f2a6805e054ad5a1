"""The importer of NumPy arrays: layouts, order, and everything it must refuse."""

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeplan.errors import InputError, StorageError, UsageError
from moeplan.traces.importers import import_trace, numpy_arrays
from moeplan.traces.reader import open_trace
from tests.traces.importers.recordings import imported, is_said, npy, npz, refused, tokens_of

T, L, K, E = 50, 3, 2, 8


def arrays(seed: int = 0) -> dict[str, Any]:
    """The layout of the real data, small."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((T, L, E)), axis=-1)[..., :K].astype(np.uint8)
    weights = np.sort(rng.random((T, L, K)).astype(np.float16), axis=-1)[..., ::-1]
    return {
        "expert_ids": ids,
        "weights": np.ascontiguousarray(weights),
        "seq_id": np.sort(rng.integers(0, 9, T)).astype(np.int32),
        "pos": np.arange(T, dtype=np.int32) + 300,
        "num_experts": np.array(E),
    }


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("rows", [7, 65_536])
def test_the_layout_of_the_real_data_is_imported_whole_whatever_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[..., None], rows: int
) -> None:
    monkeypatch.setattr(numpy_arrays, "MAX_BATCH_ROWS", rows)
    whole = arrays()
    save(tmp_path / "r.npz", **whole)
    summary = import_trace(tmp_path / "r.npz", tmp_path / "trace")
    batch = tokens_of(tmp_path / "trace", weights=True)
    np.testing.assert_array_equal(batch.ids, whole["expert_ids"])
    np.testing.assert_array_equal(batch.weights, whole["weights"])
    np.testing.assert_array_equal(batch.sample, whole["seq_id"])
    np.testing.assert_array_equal(batch.position, whole["pos"])
    assert (batch.step, batch.source_rank, set(batch.phase.tolist())) == (None, None, {1})
    assert (summary.importer, summary.is_counts, summary.has_weights, summary.notes) == ("numpy", False, True, ())
    assert (summary.num_tokens, summary.num_samples) == (T, len(set(whole["seq_id"].tolist())))
    assert (summary.model.name, summary.model.num_experts, summary.model.top_k) == ("r", E, K)
    assert summary.model.layer_ids == (0, 1, 2)


def test_a_plain_array_is_top_1_and_its_guesses_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_arrays, "MAX_BATCH_ROWS", 7)
    ids = np.arange(T * L).reshape(T, L) % 7
    summary = imported(tmp_path, {"r.npy": npy(ids)}, phase="train", name="mine")
    batch = tokens_of(tmp_path / "trace")
    np.testing.assert_array_equal(batch.ids[:, :, 0], ids)
    assert (batch.sample, summary.model.name, summary.model.num_experts, summary.model.top_k) == (None, "mine", 7, 1)
    assert batch.position.tolist() == list(range(T))
    assert set(batch.phase.tolist()) == {2}
    assert is_said(summary, "7 taken, the largest id + 1")
    assert is_said(summary, "samples are unknown")
    assert is_said(summary, "as ExFlow records: second choices are unknown")


def test_an_archive_of_one_array_may_call_it_anything(tmp_path: Path) -> None:
    summary = imported(tmp_path, {"r.npz": archive(routing=npy(arrays()["expert_ids"]))}, num_experts=12)
    assert "array routing taken for expert_ids" in summary.notes
    assert open_trace(tmp_path / "trace").model.num_experts == 12
    np.testing.assert_array_equal(tokens_of(tmp_path / "trace").ids, arrays()["expert_ids"])


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.int64, np.dtype(">i4")])
def test_minus_one_is_not_routed_in_any_signed_type(tmp_path: Path, kind: Any) -> None:
    summary = imported(tmp_path, {"r.npy": npy(changed((3, 1, 1), -1, kind))}, num_experts=E)
    assert "1 choices of no expert: dropped or padding" in summary.notes
    ids = tokens_of(tmp_path / "trace").ids
    assert ids[3, 1, 1] == 65_535
    assert (ids == 65_535).sum() == 1


@pytest.mark.parametrize("save", [np.save, np.savez_compressed])
def test_an_array_in_column_order_is_read_alike(tmp_path: Path, save: Callable[..., None]) -> None:
    ids, stream = arrays()["expert_ids"], io.BytesIO()
    save(stream, np.asfortranarray(ids))
    imported(tmp_path, {"r": stream.getvalue()}, num_experts=E)
    np.testing.assert_array_equal(tokens_of(tmp_path / "trace").ids, ids)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 9), st.integers(1, 3), st.integers(1, 4))
def test_choices_come_out_by_descending_weight_each_with_its_own(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, tokens: int, layers: int, top_k: int
) -> None:
    shape = (tokens, layers, top_k)
    ids = data.draw(hnp.arrays(np.int16, shape, elements=st.integers(0, 99)))
    weights = data.draw(hnp.arrays(np.float32, shape, elements=st.floats(-4, 4, width=16)))
    folder = tmp_path_factory.mktemp("import")
    np.savez(folder / "r.npz", expert_ids=ids, weights=weights)
    summary = import_trace(folder / "r.npz", folder / "trace", num_experts=100)
    batch = tokens_of(folder / "trace", weights=True)
    assert (np.diff(batch.weights.astype(np.float32), axis=-1) <= 0).all()
    for token in range(tokens):
        for layer in range(layers):
            expected = sorted(zip(ids[token, layer], -weights[token, layer], strict=True), key=lambda pair: pair[1])
            assert batch.ids[token, layer].tolist() == [int(expert) for expert, _ in expected]
    unordered = (np.diff(weights, axis=-1) > 0).any(-1).sum()
    assert is_said(summary, f"{unordered:,} cells were not in the order") == (unordered > 0)


def test_the_real_trace_is_imported_to_the_last_cell(tmp_path: Path, gpt_oss: Path) -> None:
    import_trace(gpt_oss, tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    model = trace.model
    assert (trace.num_tokens, model.num_layers, model.num_experts, model.top_k) == (137_957, 24, 32, 4)
    with np.load(gpt_oss) as real:
        batches = list(trace.batches(weights=True))
        for name, key in (("ids", "expert_ids"), ("weights", "weights"), ("sample", "seq_id"), ("position", "pos")):
            np.testing.assert_array_equal(np.concatenate([getattr(batch, name) for batch in batches]), real[key])


def real(**changes: Any) -> bytes:
    """The real layout with arrays replaced; None leaves one out."""
    return npz(**{name: value for name, value in (arrays() | changes).items() if value is not None})


def npy_header(text: str, data: bytes = b"") -> bytes:
    header = text.encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def archive(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in members.items():
            packed.writestr(f"{name}.npy", data)
    return stream.getvalue()


def changed(index: Any, value: Any, kind: Any = np.int64, name: str = "expert_ids") -> Any:
    array = arrays()[name].astype(kind)
    array[index] = value
    return array


def zip_bomb() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        shape = (300 * 2**20 // 24, 24)
        with packed.open("expert_ids.npy", "w", force_zip64=True) as member:
            member.write(npy_header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}"))
            for _ in range(300):
                member.write(bytes(2**20))
    return stream.getvalue()


HEADER = "{{'descr': '{}', 'fortran_order': False, 'shape': {}}}"

MALFORMED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty file": (lambda: b"", "of no kind"),
    "the second byte of a pickle": (lambda: b"a\x02", "of no kind"),
    "a pickle": (lambda: b"\x80\x04\x95\x00\x00", "loading it may run code"),
    "truncated archive": (lambda: real()[:700], "damaged"),
    "an archive of nothing": (lambda: archive(), "arrays none"),
    "a flipped byte": (lambda: (lambda d: d[:200] + bytes([d[200] ^ 0xFF]) + d[201:])(real()), "damaged"),
    "truncated array": (lambda: npy(arrays()["expert_ids"])[:-9], "header promises"),
    "an array with more behind it": (lambda: npy(arrays()["expert_ids"]) + b"more", "header promises"),
    "another format version": (lambda: b"\x93NUMPY\x09\x00" + bytes(100), "version"),
    "an absurd shape": (lambda: npy_header(HEADER.format("<i8", (2**40, 24, 4)), bytes(64)), "header promises"),
    "a shape past 64 bits": (lambda: npy_header(HEADER.format("<i8", (2**62, 2**62)), bytes(64)), "header promises"),
    "a negative shape": (lambda: npy_header(HEADER.format("<i8", (-4, -2)), bytes(64)), "header promises"),
    "a zip bomb": (zip_bomb, "unpacks from"),
    "a header nested deeply": (lambda: npy_header("(" * 9000 + ")" * 9000), "damaged"),
    "a header that is code": (lambda: npy_header("__import__('os').system('true')"), "damaged"),
    "objects": (lambda: npy(np.array([[{}, {}]], dtype=object)), "type object"),
    "text cells": (lambda: npy(np.array([["a", "b"]])), "of type"),
    "floats for ids": (lambda: npy(arrays()["expert_ids"].astype(np.float32)), "type float32"),
    "one dimension": (lambda: npy(np.arange(9)), "shape (9,)"),
    "four dimensions": (lambda: npy(np.zeros((2, 2, 2, 2), int)), "shape (2, 2, 2, 2)"),
    "zero tokens": (lambda: npy(np.zeros((0, 24, 4), int)), "shape (0, 24, 4)"),
    "zero choices": (lambda: npy(np.zeros((9, 4, 0), int)), "shape (9, 4, 0)"),
    "absurdly many layers": (lambda: npy(np.zeros((2, 5000), np.uint8)), "at most 4096 layers"),
    "an id past the experts": (lambda: real(expert_ids=changed((4, 1, 0), E)), "goes to expert 8 in layer 1"),
    "an id past 16 bits": (lambda: real(expert_ids=changed((4, 1, 0), 2**16)), "expert id 65536"),
    "an id below -1": (lambda: real(expert_ids=changed((4, 1, 0), -2)), "expert id -2"),
    "nothing routed": (lambda: npy(np.full((5, 3), -1)), "no token is routed: every expert id is -1"),
    "counts under another name": (lambda: archive(loads=npy(np.full((4, 3, 8), 9))), "named counts"),
    "NaN weights": (lambda: real(weights=changed((9, 2, 1), np.nan, np.float16, "weights")), "not finite"),
    "weights past float16": (lambda: real(weights=changed((9, 2, 0), 1e9, np.float64, "weights")), "not finite"),
    "weights of another shape": (lambda: real(weights=arrays()["weights"][:, :, :1]), "weights is"),
    "integer weights": (lambda: real(weights=np.ones((T, L, K), int)), "expected floats"),
    "fewer samples than tokens": (lambda: real(seq_id=np.arange(T - 1)), "seq_id is"),
    "samples as floats": (lambda: real(seq_id=np.arange(T) * 1.0), "expected integers"),
    "samples past 64 bits": (lambda: real(seq_id=np.full(T, 2**63, np.uint64)), "seq_id from"),
    "negative positions": (lambda: real(pos=np.arange(T) - 1), "negative position"),
    "positions past 32 bits": (lambda: real(pos=np.arange(T) + 2**31), "pos from"),
    "positions below 32 bits": (lambda: real(pos=np.arange(T) - 2**40), "pos from"),
    "positions of each layer": (lambda: real(pos=np.zeros((T, L), int)), "pos is"),
    "no experts": (lambda: real(num_experts=np.array(0)), "num_experts is 0"),
    "too many experts": (lambda: real(num_experts=np.array(70_000)), "num_experts is 70000"),
    "half an expert": (lambda: real(num_experts=np.array(7.5)), "num_experts is 7.5"),
    "many numbers of experts": (lambda: real(num_experts=np.array([8, 8])), "expected a single number"),
    "fewer experts than choices": (lambda: real(num_experts=np.array(1)), "top-2"),
    "other arrays": (lambda: real(expert_ids=None, counts=np.zeros((4, 4), int)), "expected expert_ids"),
    "a name with a line break": (lambda: archive(**{"a\nb": npy(np.zeros((4, 4), int))}), "printable"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_recording_is_one_clear_line_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    make, expected = MALFORMED[name]
    refused(tmp_path, {"recording.npz": make()}, expected)


def test_an_absent_source_a_folder_or_a_pipe_is_an_input_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    for source in (tmp_path / "absent.npz", tmp_path, tmp_path / "pipe.npz"):
        with pytest.raises(InputError, match="cannot be read") as caught:
            import_trace(source, tmp_path / "trace")
        assert str(caught.value).count(str(source)) == 1
    assert not (tmp_path / "trace").exists()


def test_an_option_that_contradicts_is_a_usage_error(tmp_path: Path) -> None:
    for options in ({"num_experts": 9}, {"phase": "sleep"}):
        refused(tmp_path, {"r.npz": real()}, kind=UsageError, **options)


def test_a_destination_that_is_not_empty_or_under_a_file_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    imported(tmp_path, {"r.npz": real()})
    before = open_trace(tmp_path / "trace").sha256
    with pytest.raises(UsageError, match="not empty"):
        imported(tmp_path, {"r.npz": real()})
    assert open_trace(tmp_path / "trace").sha256 == before
    with pytest.raises(UsageError, match="not empty"):  # before the recording is looked for
        import_trace(tmp_path / "gone.npz", tmp_path / "trace")
    with pytest.raises(StorageError, match="cannot be"):
        imported(tmp_path, {"r.npz": real()}, to="in/r.npz/trace")
