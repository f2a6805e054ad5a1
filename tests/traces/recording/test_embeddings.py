"""The sidecar of hidden states."""

from pathlib import Path

import numpy as np
import pytest

from moeplan.errors import StorageError, UsageError
from moeplan.traces.recording.embeddings import EmbeddingWriter, embedded_layers
from moeplan.traces.schema import TokenBatch


def batch(first: int, tokens: int) -> TokenBatch:
    position = np.arange(first, first + tokens, dtype=np.int32)
    return TokenBatch(
        None, position.astype(np.int64), position, None, np.zeros(tokens, np.int8), np.empty(0, np.uint16)
    )


def test_files_are_bounded_and_hold_all_tokens_in_order(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    states = np.random.default_rng(0).random((10, 8)).astype(np.float16)
    with EmbeddingWriter(tmp_path, [2], rank=5, max_bytes=100) as writer:
        for first in range(0, 10, 2):
            writer.append(batch(first, 2), {2: states[first : first + 2]})
    paths = sorted(tmp_path.iterdir(), key=lambda path: path.name)
    parts = [load_file(path) for path in paths]
    assert len(paths) == 3
    assert all(path.name.startswith("embeddings-5-") and path.suffix == ".safetensors" for path in paths)
    assert all(part.keys() == {"sample", "position", "layer_2"} for part in parts)
    np.testing.assert_array_equal(np.concatenate([part["layer_2"] for part in parts]), states)
    assert np.concatenate([part["position"] for part in parts]).tolist() == [*range(10)]


def test_nothing_is_written_of_no_layer_or_no_token(tmp_path: Path) -> None:
    with EmbeddingWriter(tmp_path, []) as none, EmbeddingWriter(tmp_path, [0]) as empty:
        none.append(batch(0, 2), {})
        empty.append(batch(0, 0), {0: np.empty((0, 8), np.float16)})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = EmbeddingWriter(tmp_path / "file", [0])
    writer.append(batch(0, 2), {0: np.zeros((2, 8), np.float16)})
    with pytest.raises(StorageError, match="file"):
        writer.flush()


def test_layers_are_all_or_ordinals() -> None:
    assert embedded_layers("all", 3) == (0, 1, 2)
    assert embedded_layers("", 3) == ()
    assert embedded_layers("2,0,2", 3) == embedded_layers([2, 0], 3) == (0, 2)
    for text in ("3", "0,,1", "-1", "first"):
        with pytest.raises(UsageError, match="0 to 2"):
            embedded_layers(text, 3)
