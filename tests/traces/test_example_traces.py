"""The real trace that ships: what its file holds, what becomes of it, and that it is a part of the whole recording."""

import hashlib
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.write_example import MAX_BYTES, NAME, SEED, drawn
from moeplan.errors import UsageError
from moeplan.traces.examples import EXAMPLES, example_tokens, write_example
from moeplan.traces.reader import open_trace
from moeplan.traces.split import fitted

NOTICE = (files("moeplan.traces.examples") / "NOTICE-gpt-oss-20b.txt").read_text()


@pytest.fixture(scope="module")
def tokens() -> Any:
    return example_tokens("gpt-oss-20b")


def test_the_file_fits_and_is_the_one_that_the_notice_states() -> None:
    content = (files("moeplan.traces.examples") / NAME).read_bytes()
    assert len(content) <= MAX_BYTES
    assert hashlib.sha256(content).hexdigest() == re.findall(r"\b[0-9a-f]{64}\b", NOTICE)[0]


def test_the_trace_written_has_the_files_tokens_and_the_models_sizes(tokens: Any, tmp_path: Path) -> None:
    written = write_example("gpt-oss-20b", tmp_path / "traces")
    (batch,) = open_trace(tmp_path / "traces").batches()
    for column in ("sample", "position", "phase", "ids"):
        np.testing.assert_array_equal(getattr(batch, column), getattr(tokens, column))
    assert (batch.step, batch.source_rank) == (None, None)
    model = written.model
    assert (model.num_experts, model.top_k, model.num_layers, model.num_hidden_layers) == (32, 4, 24, 24)
    assert (model.copy_bytes, model.ffn_size, model.attention.kv_size) == (5760, 2880, 2 * 8 * 64)


def test_two_writes_have_one_hash(tmp_path: Path) -> None:
    first, second = (write_example("gpt-oss-20b", tmp_path / name) for name in ("first", "second"))
    assert first.sha256 == second.sha256


def test_every_token_has_distinct_experts_and_positions_count_on_within_a_sequence(tokens: Any) -> None:
    assert (np.diff(np.sort(tokens.ids, axis=2), axis=2) > 0).all()
    assert tokens.ids.max() < EXAMPLES["gpt-oss-20b"].num_experts
    same = tokens.sample[1:] == tokens.sample[:-1]
    assert (np.diff(tokens.position)[same] == 1).all()
    assert same.sum() == len(tokens) - len(np.unique(tokens.sample))  # each sequence in one piece


def test_no_seed_of_a_solve_puts_the_draw_on_one_side_of_its_split(tokens: Any) -> None:
    samples = np.unique(tokens.sample)
    assert SEED < 0  # which a request refuses
    assert 0.3 < np.mean([fitted(samples, seed=seed, fraction=0.5).mean() for seed in range(8)]) < 0.7
    assert fitted(samples, seed=SEED, fraction=0.5).sum() == len(samples) - 1  # the highest hash is always held out


def test_the_notice_tells_the_sizes_and_the_seed(tokens: Any) -> None:
    samples = len(np.unique(tokens.sample))
    assert f"{samples} whole ones ({len(tokens):,} tokens)" in " ".join(NOTICE.split())
    assert f'"{SEED}:SEQUENCE"' in NOTICE


def test_the_script_draws_the_same_from_the_whole_recording(gpt_oss: Path, tokens: Any) -> None:
    arrays = drawn(gpt_oss)
    np.testing.assert_array_equal(arrays["expert_ids"], tokens.ids)
    np.testing.assert_array_equal(np.repeat(arrays["seq_id"], arrays["num_tokens"]), tokens.sample)


def test_its_sequences_are_whole_ones_of_the_recording(gpt_oss: Path, tokens: Any) -> None:
    with np.load(gpt_oss) as whole:
        kept_T = np.isin(whole["seq_id"], np.unique(tokens.sample))
        np.testing.assert_array_equal(whole["seq_id"][kept_T], tokens.sample)
        np.testing.assert_array_equal(whole["pos"][kept_T], tokens.position)
        np.testing.assert_array_equal(whole["expert_ids"][kept_T], tokens.ids)


def test_an_unknown_name_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"example 'gpt-oss'; expected gpt-oss-20b"):
        write_example("gpt-oss", tmp_path / "traces")
    assert not (tmp_path / "traces").exists()
