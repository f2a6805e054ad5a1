"""Prefill and decoding: what batches, padding and ends of text leave in the trace."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moeplan.traces
from moeplan.errors import UsageError
from moeplan.traces.huggingface.checkpoint import load_model
from moeplan.traces.huggingface.record import _Progress, record_model
from moeplan.traces.reader import open_trace
from moeplan.traces.recording.kept import sampled

PROMPTS = [np.random.default_rng(seed).integers(4, 30, length).tolist() for seed, length in enumerate((9, 3, 14, 1, 6))]


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "gpt_oss"])
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Any:
    loaded = load_model(checkpoint(request.param))
    loaded.generation_config.eos_token_id = None
    return loaded


def recorded(model: Any, folder: Path, prompts: list[list[int]], **options: Any) -> Any:
    record_model(model, prompts, folder, name="tiny", tokenizer="x", **options)
    return read(folder)


def read(folder: Path) -> Any:
    (batch,) = open_trace(folder).batches()
    return batch


def by_token(batch: Any) -> dict[tuple[int, int], list[list[int]]]:
    keys = zip(batch.sample.tolist(), batch.position.tolist(), strict=True)
    return dict(zip(keys, batch.ids.tolist(), strict=True))


def test_padded_batches_record_what_single_prompts_do(model: Any, tmp_path: Path) -> None:
    together = recorded(model, tmp_path / "a", PROMPTS, generate=3, batch_samples=4)
    alone = recorded(model, tmp_path / "b", PROMPTS, generate=3, batch_samples=1)
    expected = {(sample, at) for sample, prompt in enumerate(PROMPTS) for at in range(len(prompt) + 3)}
    assert by_token(together) == by_token(alone)
    assert by_token(together).keys() == expected
    assert together.step is None
    assert together.source_rank is None


def test_decoded_tokens_are_those_that_greedy_generation_gives(model: Any, tmp_path: Path) -> None:
    prompt = PROMPTS[0]
    batch = recorded(model, tmp_path / "a", [prompt], generate=4)
    whole = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0].tolist()
    again = recorded(model, tmp_path / "b", [whole], router=r".*\.(gate|router)")  # what a pattern finds is the same
    assert by_token(batch) == by_token(again)
    assert batch.phase.tolist() == [0] * len(prompt) + [1] * 4
    assert not again.phase.any()


def test_a_sample_ends_before_its_end_of_text_and_the_others_go_on(model: Any, tmp_path: Path) -> None:
    free = recorded(model, tmp_path / "free", PROMPTS[:2], generate=5)
    follow = [
        model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS[:2]
    ]
    end = follow[0][2]
    model.generation_config.eos_token_id = [end, 47]
    ended = recorded(model, tmp_path / "ended", PROMPTS[:2], generate=5)
    model.generation_config.eos_token_id = None
    left = [[*tokens, end].index(end) for tokens in follow]
    last = [len(prompt) + count for prompt, count in zip(PROMPTS, left, strict=False)]
    assert by_token(ended) == {key: ids for key, ids in by_token(free).items() if key[1] < last[key[0]]}


def test_a_share_of_the_samples_keeps_their_numbers_and_the_bound_is_met_exactly(model: Any, tmp_path: Path) -> None:
    prompts = PROMPTS * 8
    part = recorded(model, tmp_path / "part", prompts, sample_rate=0.4)
    bounded = recorded(model, tmp_path / "bounded", prompts, sample_rate=0.4, max_tokens=17, batch_samples=2)
    np.testing.assert_array_equal(bounded.ids, part.ids[:17])
    chosen = np.flatnonzero(sampled(np.arange(len(prompts)), 0.4))
    assert 0 < len(chosen) < len(prompts)
    assert np.unique(part.sample).tolist() == chosen.tolist()
    whole = by_token(recorded(model, tmp_path / "whole", prompts))
    assert by_token(part) == {key: ids for key, ids in whole.items() if key[0] in chosen}


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[5] * 127], {"generate": 2}, "sample 0 has 127 tokens and 2 to generate; the model takes 128"),
        ([[5], [48]], {}, "sample 1 has token 48; the model knows 48"),
        ([[5]], {"sample_rate": 1e-9}, "keeps none of 1 samples"),
        ([[5]], {"sample_rate": 0.0}, "sample rate 0.0"),
        ([[5]], {"max_tokens": 0}, "at most 0 tokens"),
        ([[5]], {"embeddings": "9"}, "embeddings of layers 9"),
        ([[5]], {"router": "nothing"}, "matches no module"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    model: Any, tmp_path: Path, prompts: list[list[int]], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        recorded(model, tmp_path / "t", prompts, **options)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_what_was_recorded(model: Any, tmp_path: Path) -> None:
    def interrupts(text: str) -> None:
        if "recorded 2 of" in text:
            raise KeyboardInterrupt

    done = record_model(
        model, PROMPTS, tmp_path / "t", name="tiny", tokenizer="x", batch_samples=1, on_progress=interrupts
    )
    assert done.interrupted
    assert done.num_tokens == open_trace(tmp_path / "t").num_tokens == len(PROMPTS[0]) + len(PROMPTS[1])


def test_the_time_left_is_that_of_the_nearer_end_at_the_rate_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    said: list[str] = []
    by_samples, by_tokens = _Progress(said.append, 40, None), _Progress(said.append, 40, 100)
    by_samples(0, 0)
    now_s[0] = 130.0
    by_samples(10, 50)
    by_tokens(10, 50)
    assert said == [
        "recorded 0 of 40 samples, 0 tokens",
        "recorded 10 of 40 samples, 50 tokens, 1:30 left",
        "recorded 10 of 40 samples, 50 tokens, 0:30 left",
    ]


TOKENS = np.random.default_rng(2).integers(4, 30, (3, 12))


@pytest.fixture(params=["olmoe", "glm4_moe", "granitemoe"])
def tuned(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Any:
    loaded = load_model(checkpoint(request.param))
    loaded.generation_config.eos_token_id = None
    return loaded


@pytest.mark.parametrize("reentrant", [False, True])
def test_fine_tuning_with_gradient_checkpointing_is_recorded_once(tuned: Any, tmp_path: Path, reentrant: bool) -> None:
    record_model(tuned, TOKENS.tolist(), tmp_path / "plain", name="x", tokenizer="x")
    tuned.train()
    tuned.activation_checkpointing_enable({"use_reentrant": reentrant})
    tuned.enable_input_require_grads()
    tokens_BS = torch.from_numpy(TOKENS)
    mask_BS = torch.ones_like(tokens_BS)
    mask_BS[1, 7:] = 0
    with moeplan.traces.record(tuned, tmp_path / "t"):
        tuned(input_ids=tokens_BS, attention_mask=mask_BS, labels=tokens_BS).loss.backward()
    batch, plain = read(tmp_path / "t"), read(tmp_path / "plain")
    np.testing.assert_array_equal(batch.ids, plain.ids[mask_BS.flatten().bool().numpy()])
    assert set(batch.phase.tolist()) == {2}


def test_generation_continues_its_samples_and_is_told_from_prefill(tuned: Any, tmp_path: Path) -> None:
    tokens_BS = torch.from_numpy(TOKENS)
    mask_BS = torch.ones_like(tokens_BS)
    mask_BS[0, :4] = 0
    with moeplan.traces.record(tuned, tmp_path / "t"):
        whole = tuned.generate(tokens_BS, attention_mask=mask_BS, max_new_tokens=4, do_sample=False)
        tuned(tokens_BS)
    batch = read(tmp_path / "t")
    lengths = [8, 12, 12]
    for sample, (length, row) in enumerate(zip(lengths, whole.tolist(), strict=True)):
        rows = batch.sample == sample
        assert batch.position[rows].tolist() == [*range(length + 3)]
        assert batch.phase[rows].tolist() == [0] * length + [1] * 3
        record_model(tuned, [row[12 - length : -1]], tmp_path / str(sample), name="x", tokenizer="x")
        np.testing.assert_array_equal(batch.ids[rows], read(tmp_path / str(sample)).ids)
    assert set(batch.sample.tolist()) == {*range(6)}
