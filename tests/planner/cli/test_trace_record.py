"""`moeplan trace record` as a user calls it, on a small checkpoint of random weights."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import MoeplanError
from moeplan.planner.cli import screen
from moeplan.planner.cli.record import record
from moeplan.planner.demo.text import record_embedded
from moeplan.traces.reader import open_trace
from tests.builders import known
from tests.planner.cli.conftest import ended, started, wait_until_said

TEXT = "the quick brown fox jumps over the lazy dog, again and again.\n" * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny OLMoE with a tokenizer of single characters."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny-olmoe"
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}
    config = OlmoeConfig(**sizes, num_attention_heads=2, num_experts=6, num_experts_per_tok=2, eos_token_id=None)
    OlmoeForCausalLM(config).save_pretrained(folder)
    words = {word: index for index, word in enumerate(["<unk>", *"abcdefghijklmnopqrstuvwxyz ,.\n"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(TEXT)
    (tmp_path / "set.jsonl").write_text('{"text": "abc"}\n{"text": ""}\n{"prompt": "de fg"}\n')
    return tmp_path


def test_a_text_is_recorded_with_the_names_of_model_and_tokenizer(moeplan: Any, folder: Path, model: Path) -> None:
    done = moeplan("trace", "record", model, "--text", "book.txt", "--sample-tokens", "50", "--weights", cwd=folder)
    trace = open_trace(folder / "traces")
    (batch,) = trace.batches(weights=True)
    assert "recorded  450 tokens of book.txt through tiny-olmoe" in done.stdout
    assert np.bincount(known(batch.sample)).tolist() == [50] * 9
    assert (trace.meta.tokenizer or "").startswith("TokenizersBackend sha256:")
    assert "OlmoeForCausalLM of transformers" in trace.meta.recorder
    # After ten seconds it says how far it is.
    assert not [line for line in done.stderr.splitlines() if " of 9 samples, " not in line]


def test_a_data_set_is_recorded_with_what_the_model_goes_on_to_say(moeplan: Any, folder: Path, model: Path) -> None:
    args = ["--dataset", "set.jsonl", "--generate", "3", "--embeddings", "all", "--json", "-o", "out"]
    done = moeplan("trace", "record", model, *args, cwd=folder)
    assert json.loads(done.stdout) == {"trace": "out", "num_tokens": 14, "model": "tiny-olmoe", "num_empty": 1}
    (batch,) = open_trace(folder / "out").batches()
    assert batch.phase.tolist().count(1) == 6
    assert len(list((folder / "out").glob("embeddings-0-*.safetensors"))) == 1


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("{model}", {}, "give --text FILE, or --dataset"),
    ("{model}", {"text": "book.txt", "dataset": "set.jsonl"}, "--text and --dataset are both given"),
    ("{model}", {"text": "book.txt", "router": "*"}, "no regular expression"),
    ("{model}", {"text": "book.txt", "sample_rate": 2.0}, "sample rate 2.0"),
    ("{model}", {"text": "book.txt", "output": "full"}, "not empty"),
    ("{model}", {"dataset": "book.txt"}, "line 1 is no JSON"),
    ("full", {"text": "book.txt"}, "full"),
    ("nowhere", {"text": "book.txt"}, "expected embedded, or the directory"),
    ("embedded", {"dataset": "set.jsonl"}, "embedded does not take --dataset,"),
    ("embedded", {"text": "book.txt", "generate": 3}, "embedded does not take --generate,"),
    ("embedded", {"text": "book.txt", "sample_tokens": 9999}, "does not fill a sample"),
    ("embedded", {}, "--text"),
    ("embedded", {"text": "book.txt", "max_tokens": 0}, "at most 0 tokens"),
    ("embedded", {"text": "book.txt", "embeddings": "6"}, "0 to 5"),
]


@pytest.mark.parametrize(("name", "options", "words"), REFUSALS)
def test_what_cannot_be_recorded_is_refused_and_nothing_written(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(folder)
    Path("full").mkdir()
    Path("full/a.txt").touch()
    before = sorted(folder.rglob("*"))
    paths: Any = {key: Path(options[key]) for key in options.keys() & {"text", "dataset", "output"}}
    with pytest.raises(MoeplanError, match=words):
        record(name.format(model=model), **options | paths)
    assert sorted(folder.rglob("*")) == before


def test_the_embedded_model_takes_a_share_a_bound_and_embeddings(tmp_path: Path) -> None:
    whole = record_embedded(TEXT, tmp_path / "whole", sample_tokens=16)
    part = record_embedded(TEXT, tmp_path / "part", sample_tokens=16, sample_rate=0.5, max_tokens=100, embeddings="0,2")
    (all_of_it,), (some,) = whole.batches(), part.batches()
    rows = np.flatnonzero(np.isin(known(all_of_it.sample), known(some.sample)))[:100]
    np.testing.assert_array_equal(some.ids, all_of_it.ids[rows])
    assert len(some) == 100


def test_progress_is_lines_off_a_terminal_and_skipped_prompts_are_in_the_last_ones(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(screen, "LINE_S", 0.0)
    record(str(model), dataset=Path("set.jsonl"), batch_samples=1)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert lines[-2] == "moeplan: recorded 0 of 2 samples, 0 tokens"
    assert re.fullmatch(r"moeplan: recorded 1 of 2 samples, 3 tokens, 0:\d\d left", lines[-1])
    assert "skipped   1 empty prompt(s) of set.jsonl" in said.out


def test_ctrl_c_leaves_a_readable_trace_and_exits_with_130(folder: Path, model: Path) -> None:
    (folder / "long.txt").write_text(TEXT * 400)
    args = ("--text", "long.txt", "--generate", "50", "--batch-samples", "1")
    process = started("trace", "record", model, *args, cwd=folder)
    wait_until_said(process, r"^moeplan: recorded [1-9]")
    errors = ended(process, signal.SIGINT, 130)
    assert "interrupted" in errors
    assert open_trace(folder / "traces").num_tokens > 0
