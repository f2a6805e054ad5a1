"""The reader: layers, phases, order of parts, the hash, and everything it must refuse."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moeplan.errors import InputError, MismatchError, MoeplanError, UsageError
from moeplan.files import sha256_json
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import METADATA_KEY, TraceMeta
from moeplan.traces.writer import TraceWriter
from tests.builders import known
from tests.traces.builders import META, MakeTrace, make_batch


def test_chosen_layers_come_in_the_order_asked_for_contiguous_and_of_none_the_scalars(make_trace: MakeTrace) -> None:
    batch = make_batch(50, known=("sample", "step", "source_rank"))
    trace = make_trace(batch)
    (read,), (scalars,) = trace.batches([2, 0], weights=True), trace.batches(())
    np.testing.assert_array_equal(read.ids, batch.ids[:, [2, 0]])
    np.testing.assert_array_equal(known(read.weights), known(batch.weights)[:, [2, 0]])
    assert read.ids[:, 1].flags.c_contiguous
    assert scalars.ids.shape == (50, 0, 2)
    np.testing.assert_array_equal(scalars.step, known(batch.step))


def test_only_tokens_of_the_phases_asked_for_come_out(make_trace: MakeTrace) -> None:
    batches = [make_batch(40, seed=seed) for seed in range(3)]
    read = list(make_trace(*batches).batches(phases=["prefill", "train"]))
    wanted = [batch.ids[batch.phase != 1] for batch in batches]
    np.testing.assert_array_equal(np.concatenate([batch.ids for batch in read]), np.concatenate(wanted))


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


def test_a_trace_says_what_it_knows(make_trace: MakeTrace) -> None:
    trace = make_trace(make_batch(20, known=("step",)), weights=False)
    assert trace.known == {"step"}
    assert not trace.has_weights


@pytest.mark.parametrize(
    "request_",
    [{"layers": [3]}, {"layers": [-1]}, {"phases": ["generate"]}, {"weights": True}, {"phases": ["train"]}],
)
def test_what_a_trace_has_not_is_a_usage_error(make_trace: MakeTrace, request_: dict[str, Any]) -> None:
    batch = dataclasses.replace(make_batch(20), phase=np.zeros(20, np.int8))
    with pytest.raises(UsageError):
        list(make_trace(batch, weights=False).batches(**request_))


def test_parts_of_two_models_are_refused_by_name(make_trace: MakeTrace) -> None:
    one, two = make_trace(make_batch(5), name="one"), make_trace(make_batch(5), name="two")
    path = Path(two.path) / two.files[0]
    changed = rewritten(path, lambda meta: meta["model"].update(name="mixtral"))
    pq.write_table(changed, Path(one.path) / "part-1-1-0.parquet")
    with pytest.raises(MismatchError, match=r"tiny.*mixtral|mixtral.*tiny"):
        open_trace(one.path)


@pytest.mark.parametrize("difference", ["weights", "sample"])
def test_parts_of_different_columns_are_refused(make_trace: MakeTrace, difference: str) -> None:
    one = make_trace(make_batch(5), name="one")
    batch = make_batch(5, known=() if difference == "sample" else ("sample",))
    two = make_trace(batch, name="two", weights=difference != "weights")
    (Path(two.path) / two.files[0]).rename(Path(one.path) / "part-1-1-0.parquet")
    with pytest.raises(MismatchError, match="do not belong together"):
        open_trace(one.path)


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> pa.Table:
    """The table of a part with its metadata changed."""
    table = pq.read_table(path)
    meta = json.loads(table.schema.metadata[METADATA_KEY])
    change(meta)
    return table.replace_schema_metadata({METADATA_KEY: json.dumps(meta).encode()})


def with_column(name: str, values: Any) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        table = pq.read_table(path)
        pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), path)

    return spoil


def with_meta(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda path: pq.write_table(rewritten(path, change), path)


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def without_column(name: str) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pq.read_table(path).drop_columns([name]), path)


def with_raw_metadata(text: bytes | None) -> Callable[[Path], None]:
    metadata = None if text is None else {METADATA_KEY: text}
    return lambda path: pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)


def empty(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(0, 0), path)


def flip_in_a_page(data: bytes) -> bytes:
    at = len(data) // 4
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


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
    "text": (with_bytes(lambda _: b"step,sample\n1,2\n" * 100), "magic"),
    "truncated": (with_bytes(lambda data: data[: len(data) // 2]), "magic"),
    "truncated in the footer": (with_bytes(lambda data: data[:-200] + data[-8:]), "cannot be read"),
    "absurd footer size": (with_bytes(lambda data: data[:-8] + b"\xff\xff\xff\x7f" + data[-4:]), "cannot be read"),
    "a flipped byte in a page": (with_bytes(flip_in_a_page), "cannot be read"),
    "pages of zeros": (with_bytes(lambda data: data[:4] + bytes(3000) + data[3004:]), "cannot be read"),
    "no metadata": (with_raw_metadata(None), "without metadata"),
    "metadata that is no JSON": (with_raw_metadata(b"{"), "metadata: not a trace"),
    "metadata that is no object": (with_raw_metadata(b"[1]"), "metadata: not a trace"),
    "metadata nested deeply": (with_raw_metadata(DEEP), "metadata: not a trace"),
    "metadata that is no UTF-8": (with_raw_metadata(b'{"a": "\xff"}'), "metadata"),
    "metadata of an absurd size": (with_raw_metadata(b" " * 2**21), "metadata of"),
    "another version": (with_meta(lambda meta: meta.update(schema_version=2)), "schema version 2"),
    "no version of a number": (with_meta(lambda meta: meta.update(schema_version="1.0")), "schema version '1.0'"),
    "the count form": (with_meta(lambda meta: meta.update(form="counts")), "form counts"),
    "an unknown form": (with_meta(lambda meta: meta.update(form="pictures")), "form"),
    "an unknown key": (with_meta(lambda meta: meta.update(colour="red")), "colour"),
    "no model": (with_meta(lambda meta: meta.pop("model")), "model"),
    "an empty hidden vector": (with_meta(lambda meta: meta["model"].update(hidden_size=0)), "hidden_size 0"),
    "absurd K and V": (with_meta(lambda meta: meta["model"]["attention"].update(kv_size=2**40)), "kv_size"),
    "fewer than no shared experts": (
        with_meta(lambda meta: meta["model"].update(num_shared_experts=-1)),
        "num_shared_experts -1",
    ),
    "a size that is true": (with_meta(lambda meta: meta["model"].update(ffn_size=True)), "ffn_size"),
    "a name that steers terminals": (with_meta(lambda meta: meta["model"].update(name="\x1b[2J\n")), "model name"),
    "a name without end": (with_meta(lambda meta: meta["model"].update(name="a" * 10**5)), "100,000 characters"),
    "a recorder that steers terminals": (with_meta(lambda meta: meta.update(recorder="a\u2028b\x1b[2J")), "recorder"),
    "a key that steers terminals": (with_meta(lambda meta: meta.update({"\x1b]0;\n" * 99: 1})), "problems"),
    "no experts": (with_meta(lambda meta: meta["model"].update(num_experts=0)), "0 experts"),
    "absurdly many experts": (with_meta(lambda meta: meta["model"].update(num_experts=2**40)), "experts"),
    "top-k above the experts": (with_meta(lambda meta: meta["model"].update(top_k=7)), "top-7"),
    "absurdly many layers": (with_meta(lambda meta: meta["model"].update(layer_ids=list(range(9999)))), "9999"),
    "more layers than columns": (with_meta(lambda meta: meta["model"].update(layer_ids=[1, 2, 3, 4])), "layer_3"),
    "another top-k than the columns": (with_meta(lambda meta: meta["model"].update(top_k=3)), "layer_0 is"),
    "no position": (without_column("position"), "position"),
    "no phase": (without_column("phase"), "phase"),
    "a missing layer": (without_column("layer_1"), "layer_1"),
    "a missing weight": (without_column("weight_2"), "weight_2"),
    "zero tokens": (empty, "zero rows"),
    "an id out of range": (with_column("layer_1", cells(6, pa.uint16())), "goes to expert 6 in layer 1"),
    "ids of 32 bits": (with_column("layer_1", cells(1, pa.int32())), "layer_1 is"),
    "lists of another length": (with_column("layer_1", cells(1, pa.uint16(), 3)), "layer_1 is"),
    "lists of any length": (with_column("layer_1", pa.array([[1, 2]] * 100, pa.list_(pa.uint16()))), "layer_1 is"),
    "a null list": (with_column("layer_1", pa.array([None, *[[1, 2]] * 99], pa.list_(pa.uint16(), 2))), "layer_1"),
    "a null in a list": (with_column("layer_1", cells(None, pa.uint16())), "layer_1 has nulls"),
    "a weight that is NaN": (with_column("weight_0", cells(np.float16("nan"), pa.float16())), "not finite"),
    "an infinite weight": (with_column("weight_0", cells(np.float16("inf"), pa.float16())), "not finite"),
    "a negative position": (with_column("position", pa.array([-1] * 100, pa.int32())), "negative position"),
    "a null position": (with_column("position", pa.array([None] * 100, pa.int32())), "position has nulls"),
    "a sample null in places": (with_column("sample", pa.array([1, *[None] * 99], pa.int64())), "sample has nulls"),
    "a sample filled in places": (with_column("sample", pa.array([*[None] * 99, 1], pa.int64())), "sample is filled"),
    "samples as text": (with_column("sample", pa.array(["a"] * 100)), "sample is string"),
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


@pytest.mark.parametrize("path", ["absent", "empty", "gopher://host/trace", "file:///no/such/place"])
def test_where_there_is_no_trace_it_says_so(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError):
        open_trace(path if "://" in path else tmp_path / path)


def test_a_pipe_among_the_parts_or_in_place_of_one_is_not_opened(make_trace: MakeTrace) -> None:
    trace = make_trace(make_batch(20))
    pipe = Path(trace.path) / "part-1-1-0.parquet"
    os.mkfifo(pipe)
    assert open_trace(trace.path).files == trace.files
    with pytest.raises(InputError, match="a pipe or device"):
        open_trace(pipe)
    with pytest.raises(InputError, match="expected a regular file"):
        TraceWriter(trace.path, META, rank=1)


def test_a_folder_named_like_a_part_is_refused_by_name(make_trace: MakeTrace) -> None:
    path = Path(make_trace(make_batch(9)).path)
    (path / "part-0-999.parquet").mkdir()
    with pytest.raises(InputError, match=r"part-0-999\.parquet is a folder; expected a Parquet file"):
        open_trace(path)


@pytest.mark.parametrize("name", ["routing.npz", "plan.json", "folder"])
def test_what_is_no_trace_is_told_how_to_become_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.mkdir() if name == "folder" else path.write_text("{}")
    with pytest.raises(InputError, match=r"^[^\n]*: no finished part .*expected one part-\*\.parquet.*trace import"):
        open_trace(path)


def test_a_directory_of_unfinished_parts_only_names_them(tmp_path: Path) -> None:
    (tmp_path / ".part-0-1-0.parquet.abc").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"1 unfinished \(\.part-0-1-0\.parquet\.abc, .*record again"):
        open_trace(tmp_path)


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
    from moeplan.traces.model import ModelSpec

    wide = ModelSpec(name="wide", layer_ids=tuple(range(64)), num_experts=256, top_k=8)
    tokens = 40_000
    batch = dataclasses.replace(make_batch(tokens), ids=np.zeros((tokens, 64, 8), np.uint16), weights=None)
    with TraceWriter(tmp_path, TraceMeta(form="tokens", model=wide, recorder="test")) as writer:
        writer.append(batch)
    sizes = [batch.ids.nbytes for batch in open_trace(tmp_path).batches()]
    assert max(sizes) <= 32 * 2**20
    assert sum(sizes) == batch.ids.nbytes
