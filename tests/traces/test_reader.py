"""The reader: layers, phases, order of parts, the hash, and everything it must refuse."""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moeplan.errors import InputError, MismatchError, MoeplanError, UsageError
from moeplan.files import sha256_json
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.schema import METADATA_KEY
from moeplan.traces.writer import TraceWriter
from tests.builders import known, meta_of, model
from tests.traces.builders import META, MakeTrace, make_batch


def test_the_layers_and_tokens_of_phases_asked_for_come_in_that_order_contiguous(make_trace: MakeTrace) -> None:
    batch = make_batch(50, known=("sample", "step", "source_rank"))
    trace = make_trace(batch)
    (read,), (scalars,) = trace.batches([2, 0], weights=True), trace.batches(())
    np.testing.assert_array_equal(read.ids, batch.ids[:, [2, 0]])
    np.testing.assert_array_equal(known(read.weights), known(batch.weights)[:, [2, 0]])
    assert read.ids[:, 1].flags.c_contiguous
    assert scalars.ids.shape == (50, 0, 2)
    np.testing.assert_array_equal(scalars.step, known(batch.step))
    assert (set(trace.known), trace.has_weights) == ({"sample", "step", "source_rank"}, True)
    kept = np.concatenate([part.position for part in trace.batches((), phases=["prefill", "train"])])
    np.testing.assert_array_equal(kept, batch.position[batch.phase != 1])


def test_a_trace_that_fits_into_a_batch_is_read_once_and_a_larger_one_each_time(
    make_trace: MakeTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(50)
    small, large = make_trace(batch), make_trace(batch, name="large")

    def read_twice(trace: Trace) -> None:
        for _ in range(2):
            (read,) = trace.batches()
            np.testing.assert_array_equal(read.ids, batch.ids)
            shutil.rmtree(trace.path, ignore_errors=True)

    read_twice(small)
    monkeypatch.setattr("moeplan.traces.reader.KEPT_BYTES", 50)
    with pytest.raises(InputError):
        read_twice(large)


def test_part_ten_follows_part_nine_and_the_hash_is_of_sorted_names_and_hashes(make_trace: MakeTrace) -> None:
    batches = [make_batch(3, seed=seed) for seed in range(12)]
    trace = make_trace(*batches)
    read = np.concatenate([batch.ids for batch in trace.batches()])
    np.testing.assert_array_equal(read, np.concatenate([batch.ids for batch in batches]))
    paths = sorted(Path(trace.path).iterdir(), key=lambda path: path.name)
    assert trace.sha256 == sha256_json([[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in paths])


def test_a_file_and_a_uri_open_like_their_directory(make_trace: MakeTrace) -> None:
    trace = make_trace(make_batch(20))
    for path in (Path(trace.path) / trace.files[0], f"file://{trace.path}"):
        again = open_trace(path)
        assert (again.num_tokens, again.sha256, again.meta) == (20, trace.sha256, trace.meta)


@pytest.mark.parametrize(
    "request_",
    [{"layers": [3]}, {"layers": [-1]}, {"phases": ["generate"]}, {"weights": True}, {"phases": ["train"]}],
)
def test_what_a_trace_has_not_is_a_usage_error(make_trace: MakeTrace, request_: dict[str, Any]) -> None:
    batch = dataclasses.replace(make_batch(20), phase=np.zeros(20, np.int8))
    with pytest.raises(UsageError):
        list(make_trace(batch, weights=False).batches(**request_))


@pytest.mark.parametrize("difference", ["weights", "sample", "model"])
def test_parts_of_different_columns_or_models_are_refused(make_trace: MakeTrace, difference: str) -> None:
    one = make_trace(make_batch(5), name="one")
    batch = make_batch(5, known=() if difference == "sample" else ("sample",))
    two = make_trace(batch, name="two", weights=difference != "weights")
    path = Path(two.path) / two.files[0]
    if difference == "model":
        with_meta(lambda meta: meta["model"].update(name="mixtral"))(path)
    path.rename(Path(one.path) / "part-1-1-0.parquet")
    words = r"tiny.*mixtral|mixtral.*tiny" if difference == "model" else "do not belong together"
    with pytest.raises(MismatchError, match=words):
        open_trace(one.path)


def with_meta(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        meta = json.loads(pq.read_table(path).schema.metadata[METADATA_KEY])
        change(meta)
        with_raw_metadata(json.dumps(meta).encode())(path)

    return spoil


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def with_column(name: str, values: Any) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        table = pq.read_table(path)
        pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), path)

    return spoil


def with_raw_metadata(text: bytes | None) -> Callable[[Path], None]:
    metadata = None if text is None else {METADATA_KEY: text}
    return lambda path: pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)


def bomb(path: Path) -> None:
    """Phases that unpack to far more than their rows can need."""
    names = pa.array([f"{index:04}" + "x" * 10**6 for index in range(100)])
    with_column("phase", pa.DictionaryArray.from_arrays(pa.array(np.arange(100, dtype=np.int8)), names))(path)


def cells(value: Any, kind: Any, top_k: int = 2) -> pa.Array:
    return pa.array([[value] * top_k] * 100, pa.list_(kind, top_k))


DEEP = b'{"schema_version":1,"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
MALFORMED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty file": (with_bytes(lambda _: b""), "cannot be read"),
    "wrong magic": (with_bytes(lambda data: b"PAR9" + data[4:-4] + b"PAR9"), "magic"),
    "truncated in the footer": (with_bytes(lambda data: data[:-200] + data[-8:]), "cannot be read"),
    "absurd footer size": (with_bytes(lambda data: data[:-8] + b"\xff\xff\xff\x7f" + data[-4:]), "cannot be read"),
    "pages of zeros": (with_bytes(lambda data: data[:4] + bytes(3000) + data[3004:]), "cannot be read"),
    "no metadata": (with_raw_metadata(None), "without metadata"),
    "metadata that is no JSON": (with_raw_metadata(b"{"), "metadata: not a trace"),
    "metadata nested deeply": (with_raw_metadata(DEEP), "metadata: not a trace"),
    "metadata of an absurd size": (with_raw_metadata(b" " * 2**21), "metadata of"),
    "another version": (with_meta(lambda meta: meta.update(schema_version=2)), "schema version 2"),
    "no version of a number": (with_meta(lambda meta: meta.update(schema_version="1.0")), "schema version '1.0'"),
    "the count form": (with_meta(lambda meta: meta.update(form="counts")), "form counts"),
    "an unknown key": (with_meta(lambda meta: meta.update(colour="red")), "colour"),
    "no model": (with_meta(lambda meta: meta.pop("model")), "model"),
    "an empty hidden vector": (with_meta(lambda meta: meta["model"].update(hidden_size=0)), "hidden_size 0"),
    "absurd K and V": (with_meta(lambda meta: meta["model"]["attention"].update(kv_size=2**40)), "kv_size"),
    "a size that is true": (with_meta(lambda meta: meta["model"].update(ffn_size=True)), "ffn_size"),
    "a name that steers terminals": (with_meta(lambda meta: meta["model"].update(name="\x1b[2J\n")), "model name"),
    "a name without end": (with_meta(lambda meta: meta["model"].update(name="a" * 10**5)), "100,000 characters"),
    "a recorder that steers terminals": (with_meta(lambda meta: meta.update(recorder="a\u2028b\x1b[2J")), "recorder"),
    "a key that steers terminals": (with_meta(lambda meta: meta.update({"\x1b]0;\n" * 99: 1})), "problems"),
    "absurdly many experts": (with_meta(lambda meta: meta["model"].update(num_experts=2**40)), "experts"),
    "top-k above the experts": (with_meta(lambda meta: meta["model"].update(top_k=7)), "top-7"),
    "absurdly many layers": (with_meta(lambda meta: meta["model"].update(layer_ids=list(range(9999)))), "9999"),
    "more layers than columns": (with_meta(lambda meta: meta["model"].update(layer_ids=[1, 2, 3, 4])), "layer_3"),
    "another top-k than the columns": (with_meta(lambda meta: meta["model"].update(top_k=3)), "layer_0 is"),
    "no position": (lambda path: pq.write_table(pq.read_table(path).drop_columns(["position"]), path), "position"),
    "zero tokens": (lambda path: pq.write_table(pq.read_table(path).slice(0, 0), path), "zero rows"),
    "an id out of range": (with_column("layer_1", cells(6, pa.uint16())), "goes to expert 6 in layer 1"),
    "ids of 32 bits": (with_column("layer_1", cells(1, pa.int32())), "layer_1 is"),
    "lists of another length": (with_column("layer_1", cells(1, pa.uint16(), 3)), "layer_1 is"),
    "a null list": (with_column("layer_1", pa.array([None, *[[1, 2]] * 99], pa.list_(pa.uint16(), 2))), "layer_1"),
    "a null in a list": (with_column("layer_1", cells(None, pa.uint16())), "layer_1 has nulls"),
    "a weight that is NaN": (with_column("weight_0", cells(np.float16("nan"), pa.float16())), "not finite"),
    "a negative position": (with_column("position", pa.array([-1] * 100, pa.int32())), "negative position"),
    "a sample null in places": (with_column("sample", pa.array([1, *[None] * 99], pa.int64())), "sample has nulls"),
    "a sample filled in places": (with_column("sample", pa.array([*[None] * 99, 1], pa.int64())), "sample is filled"),
    "an unknown phase": (
        with_column("phase", pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int8()), ["sleep"])),
        "'sleep'",
    ),
    "a null phase": (
        with_column("phase", pa.DictionaryArray.from_arrays(pa.array([None] * 100, pa.int8()), ["train"])),
        "phase has nulls",
    ),
    "columns that unpack to absurd sizes": (bomb, "unpacks to"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_trace_is_one_clear_line(make_trace: MakeTrace, name: str) -> None:
    spoil, expected = MALFORMED[name]
    trace = make_trace(make_batch(100))
    spoil(Path(trace.path) / trace.files[0])
    with pytest.raises(InputError) as refused:
        list(open_trace(trace.path).batches(weights=True))
    assert expected in str(refused.value)
    assert str(refused.value).startswith(trace.path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


def test_a_pipe_among_the_parts_or_in_place_of_one_is_not_opened(make_trace: MakeTrace) -> None:
    trace = make_trace(make_batch(20))
    pipe = Path(trace.path) / "part-1-1-0.parquet"
    os.mkfifo(pipe)
    assert open_trace(trace.path).files == trace.files
    with pytest.raises(InputError, match="a pipe or device"):
        open_trace(pipe)
    with pytest.raises(InputError, match="expected a regular file"):
        TraceWriter(trace.path, META, rank=1)


TO_IMPORT = r"^[^\n]*: no finished part .*expected one part-\*\.parquet.*trace import"
ABSENT = {  # what lies in the folder, and is opened unless it is a part of it
    "": "no finished part",
    "routing.npz": TO_IMPORT,
    "plan.json": TO_IMPORT,
    "folder/": TO_IMPORT,
    "gopher://host/trace": "gopher://host/trace",
    "file:///no/such/place": "no/such/place",
    ".part-0-1-0.parquet.abc": r"1 unfinished \(\.part-0-1-0\.parquet\.abc, .*record again",
    "part-0-999.parquet/": r"part-0-999\.parquet is a folder; expected a Parquet file",
}


@pytest.mark.parametrize("name", ABSENT)
def test_where_there_is_no_trace_it_says_what_there_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    elif name and "://" not in name:
        path.write_text("{}")
    with pytest.raises(InputError, match=ABSENT[name]) as refused:
        open_trace(name if "://" in name else tmp_path if "part" in name or not name else path)
    assert "\n" not in str(refused.value)


def test_no_damage_of_a_byte_escapes_as_another_exception_or_other_tokens(make_trace: MakeTrace) -> None:
    batch = make_batch(60)
    trace = make_trace(batch)
    path = Path(trace.path) / trace.files[0]
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[rng.integers(4, len(whole))] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            (read,) = open_trace(path).batches()
        except MoeplanError:
            continue
        np.testing.assert_array_equal(read.ids, batch.ids)


def test_reading_all_layers_of_many_tokens_stays_in_bounded_batches(tmp_path: Path) -> None:
    tokens = 40_000
    batch = dataclasses.replace(make_batch(tokens), ids=np.zeros((tokens, 64, 8), np.uint16), weights=None)
    with TraceWriter(tmp_path, meta_of(model(64, 256, 8))) as writer:
        writer.append(batch)
    sizes = [batch.ids.nbytes for batch in open_trace(tmp_path).batches()]
    assert max(sizes) <= 32 * 2**20
    assert sum(sizes) == batch.ids.nbytes
