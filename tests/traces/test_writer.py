"""The writer: round trips, bounded parts, and what is left when it is stopped."""

import dataclasses
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeplan.errors import InputError, MismatchError, StorageError, UsageError
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import TokenBatch, TraceMeta
from moeplan.traces.writer import TraceWriter
from tests.builders import known, meta_of, model
from tests.traces.builders import COUNTS_META, META, MakeTrace, make_batch

COLUMNS = [field.name for field in dataclasses.fields(TokenBatch)]


@st.composite
def recordings(draw: st.DrawFn) -> tuple[TraceMeta, list[TokenBatch]]:
    layers, top_k, experts = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(3, 65_534))
    known = draw(st.sets(st.sampled_from(["step", "sample", "source_rank"])))
    ids = st.one_of(st.integers(0, experts - 1), st.just(65_535))

    def integers(name: str, kind: type, tokens: int, low: int | None = None) -> Any:
        bounds = np.iinfo(kind)
        values = st.integers(bounds.min if low is None else low, bounds.max)
        return draw(hnp.arrays(kind, tokens, elements=values)) if name in known else None

    def batch(tokens: int) -> TokenBatch:
        cells = (tokens, layers, top_k)
        return TokenBatch(
            step=integers("step", np.int32, tokens),
            sample=integers("sample", np.int64, tokens),
            position=draw(hnp.arrays(np.int32, tokens, elements=st.integers(0, 2**31 - 1))),
            source_rank=integers("source_rank", np.int32, tokens),
            phase=draw(hnp.arrays(np.int8, tokens, elements=st.integers(0, 2))),
            ids=draw(hnp.arrays(np.uint16, cells, elements=ids)),
            weights=draw(hnp.arrays(np.float16, cells, elements=st.floats(-2, 2, width=16))),
        )

    sizes = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any))
    return meta_of(model(layers, experts, top_k)), [batch(tokens) for tokens in sizes]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(recordings(), st.integers(1, 2000))
def test_what_is_written_is_read_whatever_the_size_of_parts(
    tmp_path_factory: pytest.TempPathFactory, recording: tuple[TraceMeta, list[TokenBatch]], max_bytes: int
) -> None:
    meta, batches = recording
    directory = tmp_path_factory.mktemp("trace")
    with TraceWriter(directory, meta, weights=True, max_bytes=max_bytes) as writer:
        for batch in batches:
            writer.append(batch)
    trace = open_trace(directory)
    assert trace.meta == meta
    assert trace.num_tokens == writer.num_tokens == sum(map(len, batches))
    read = list(trace.batches(weights=True))
    for name in COLUMNS:
        columns, expected = ([getattr(batch, name) for batch in some] for some in (read, batches))
        assert columns[0] is expected[0] is None or columns[0].dtype == expected[0].dtype
        if expected[0] is not None:
            np.testing.assert_array_equal(np.concatenate(columns), np.concatenate(expected), err_msg=name)


def test_no_part_holds_more_arrow_memory_than_allowed(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, META, weights=True, max_bytes=3000) as writer:
        for seed in range(5):
            writer.append(make_batch(100, seed=seed))
    sizes = [pq.read_table(path).nbytes for path in tmp_path.iterdir()]
    assert len(sizes) > 5
    assert max(sizes) <= 3000 + 64  # the names of the phases


def test_parts_are_zstd_with_row_groups_of_65536_named_by_rank_start_and_number(tmp_path: Path) -> None:
    before_ns = time.time_ns()
    with TraceWriter(tmp_path, META, rank=3) as writer:
        writer.append(make_batch(70_000))
        writer.flush()
        writer.append(make_batch(10))
    paths = sorted(tmp_path.iterdir())
    names = [path.stem.split("-") for path in paths]
    assert [(name[0], name[1], name[3]) for name in names] == [("part", "3", "0"), ("part", "3", "1")]
    assert before_ns <= int(names[0][2]) <= time.time_ns()
    metadata = pq.ParquetFile(paths[0]).metadata
    assert [metadata.row_group(i).num_rows for i in range(2)] == [65_536, 4_464]
    assert metadata.row_group(0).column(5).compression == "ZSTD"


WRITE_FOREVER = """
import os, sys, numpy as np
from moeplan.traces.model import ModelSpec
from moeplan.traces.schema import TokenBatch, TraceMeta
from moeplan.traces.writer import TraceWriter
model = ModelSpec(name="killed", layer_ids=tuple(range(8)), num_experts=64, top_k=4)
rng = np.random.default_rng(0)
with TraceWriter(sys.argv[1], TraceMeta(form="tokens", model=model, recorder="test"), max_bytes=400_000) as writer:
    while True:
        position = np.arange(writer.num_tokens, writer.num_tokens + 1000, dtype=np.int32)
        ids = rng.integers(0, 64, (1000, 8, 4)).astype(np.uint16)
        writer.append(TokenBatch(None, position.astype(np.int64), position, None, np.zeros(1000, np.int8), ids))
        print(sum(name.startswith("part-") for name in os.listdir(sys.argv[1])), flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_whatever_ends_a_process_its_flushed_parts_are_kept(tmp_path: Path, how: signal.Signals) -> None:
    command, pipe = [sys.executable, "-c", WRITE_FOREVER, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        flushed = 0
        while flushed < 5:
            flushed = int(known(process.stdout).readline())
        process.send_signal(how)
        process.communicate()
    trace = open_trace(tmp_path)
    assert len(trace.files) >= flushed
    assert how == signal.SIGKILL or trace.unfinished == ()
    position = np.concatenate([batch.position for batch in trace.batches(())])
    np.testing.assert_array_equal(position, np.arange(trace.num_tokens))


def test_an_unfinished_part_is_named_and_skipped(make_trace: MakeTrace) -> None:
    trace = make_trace(make_batch(9))
    killed = Path(trace.path) / ".part-0-123-7.parquet.x1"
    killed.write_bytes(b"PAR1 half a par")
    again = open_trace(trace.path)
    assert again.unfinished == (killed.name,)
    assert (again.num_tokens, again.sha256) == (9, trace.sha256)


def limit_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))


def test_a_full_disk_is_one_error_and_leaves_no_file(tmp_path: Path) -> None:
    script = WRITE_FOREVER.replace("while True:", "for _ in range(2):")
    script = f"from moeplan.errors import StorageError\ntry:\n    {script.strip().replace(chr(10), chr(10) + '    ')}\n"
    script += "except StorageError as error:\n    print('refused:', error)\n"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], preexec_fn=limit_file_size, capture_output=True, text=True
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert len(said) == 1, done.stderr
    assert os.strerror(errno.EFBIG) in said[0]
    assert list(tmp_path.iterdir()) == []


def test_ranks_share_a_directory_with_no_second_run_nor_another_model_or_form(tmp_path: Path) -> None:
    for rank in (0, 1):
        with TraceWriter(tmp_path, META, rank=rank, max_seconds=0.0) as writer:
            writer.append(make_batch(5))
            assert len(list(tmp_path.iterdir())) == rank + 1  # an old token is flushed at once
    assert open_trace(tmp_path).num_tokens == 10
    with pytest.raises(UsageError, match="already holds parts of rank 1"):
        TraceWriter(tmp_path, META, rank=1)
    other = META.model_copy(update={"model": dataclasses.replace(META.model, name="other")})
    with pytest.raises(MismatchError, match="another trace"):
        TraceWriter(tmp_path, other, rank=2)
    with pytest.raises(ValueError, match="write_counts"):
        TraceWriter(tmp_path / "counts", COUNTS_META)
    with pytest.raises(StorageError):
        TraceWriter(tmp_path / open_trace(tmp_path).files[0] / "trace", META)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ids": np.zeros((10, 2, 2), np.uint16)}, ValueError),
        ({"weights": None}, ValueError),
        ({"position": np.zeros(10, np.int64)}, ValueError),
        ({"sample": None}, ValueError),
        ({"step": np.zeros(10, np.int32)}, ValueError),
        ({"ids": np.full((10, 3, 2), 6, np.uint16)}, InputError),
        ({"weights": np.full((10, 3, 2), np.nan, np.float16)}, InputError),
        ({"phase": np.full(10, 3, np.int8)}, InputError),
    ],
)
def test_a_wrong_batch_is_refused_as_a_whole(tmp_path: Path, change: dict[str, Any], error: type[Exception]) -> None:
    with TraceWriter(tmp_path, META, weights=True) as writer:
        writer.append(make_batch(10))
        with pytest.raises(error):
            writer.append(dataclasses.replace(make_batch(10), **change))
    assert open_trace(tmp_path).num_tokens == 10


OLD = (
    '{"schema_version":1,"form":"tokens","model":{"name":"m","layer_ids":[0],"num_experts":8,"top_k":2,'
    '"num_hidden_layers":null,"num_mtp_layers":null,"num_expert_groups":4,"num_shared_experts":null,'
    '"hidden_size":null,"ffn_size":null,"dtype_bytes":null,'
    '"attention":{"kv_size":null,"num_heads":null,"num_kv_heads":null}},'
    '"tokenizer":null,"recorder":"x","step_order":"known"}'
)


def test_a_limit_on_groups_is_written_and_a_model_without_one_as_it_was_before_there_were_limits() -> None:
    read = TraceMeta.model_validate_json(OLD)
    assert read.model.top_k_groups is None
    assert read.to_json() == OLD
    assert "top_k_groups" not in read.model_dump(mode="json")["model"]
    limited = meta_of(model(1, num_expert_groups=4, top_k_groups=2, hidden_size=64, dtype_bytes=2))
    assert TraceMeta.model_validate_json(limited.to_json()) == limited
    assert "copy_bytes" not in limited.model_dump(mode="json")["model"]
    assert (limited.model.copy_bytes, read.model.copy_bytes) == (128, None)
    with pytest.raises(InputError, match="top_k_groups 0"):
        model(top_k_groups=0)
