"""Traces at URIs: read wherever pyarrow opens them, written to local directories only."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moeplan.errors import InputError, UsageError
from moeplan.traces.count_form import open_any, read_counts, tabulate, write_counts
from moeplan.traces.counts import count
from moeplan.traces.part_file import local_directory
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.schema import TokenBatch, TraceMeta
from moeplan.traces.writer import TraceWriter

Make = Callable[..., TokenBatch]
MakeTrace = Callable[..., Trace]


def test_a_file_uri_is_read_and_written_like_its_directory(tmp_path: Path, meta: TraceMeta, make_batch: Make) -> None:
    uri = (tmp_path / "a trace").as_uri()
    assert "%20" in uri
    with TraceWriter(uri, meta) as writer:
        writer.append(make_batch(50))
    assert open_trace(uri).sha256 == open_trace(tmp_path / "a trace").sha256
    assert count(open_trace(uri)).num_tokens == 50
    assert isinstance(open_any(uri), Trace)
    counts_meta = meta.model_copy(update={"form": "counts"})
    write_counts((tmp_path / "counts").as_uri(), counts_meta, tabulate(open_trace(uri)))
    assert sum(table.counts.sum() for table in read_counts((tmp_path / "counts").as_uri()).tables())
    assert open_any(tmp_path / "counts").form == "counts"


def test_a_trace_in_another_file_system_is_read(
    make_trace: MakeTrace, make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import fs

    from moeplan.traces import dataset

    trace = make_trace(make_batch(30), make_batch(20, seed=1))
    far = fs.SubTreeFileSystem(str(Path(trace.path).parent), fs.LocalFileSystem())
    names = sorted(part.name for part in Path(trace.path).iterdir())
    monkeypatch.setattr(dataset, "_listing", lambda _: (far, "trace", names))
    found = open_trace("far://bucket/trace")
    assert found.sha256 == trace.sha256
    assert count(found).num_tokens == 50


@pytest.mark.parametrize("uri", ["s3://bucket/traces", "hdfs://host/traces", "file://host/traces"])
def test_a_place_that_is_not_local_is_refused_as_destination(
    tmp_path: Path, meta: TraceMeta, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="written to local ones only"):
        TraceWriter(uri, meta)
    with pytest.raises(UsageError, match="file:///DIRECTORY"):
        write_counts(uri, meta.model_copy(update={"form": "counts"}), [])
    assert not list(tmp_path.iterdir())


def test_a_uri_of_no_file_system_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="bogus:///x") as refused:
        open_any("bogus:///x")
    assert "\n" not in str(refused.value)


def test_plain_paths_are_left_as_they_are() -> None:
    assert local_directory("file:name") == Path("file:name")
    assert local_directory(Path("/a/b")) == Path("/a/b")
