"""`moeplan.traces.record` around loops that use transformers: fine-tuning, padding, generation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moeplan.traces
from moeplan.traces.huggingface.checkpoint import load_model
from moeplan.traces.huggingface.record import record_model
from moeplan.traces.reader import open_trace

PROMPTS = np.random.default_rng(2).integers(4, 30, (3, 12))


@pytest.fixture(params=["olmoe", "glm4_moe", "granitemoe"])
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Any:
    loaded = load_model(checkpoint(request.param))
    loaded.generation_config.eos_token_id = None
    return loaded


def read(path: Path) -> Any:
    (batch,) = open_trace(path).batches()
    return batch


@pytest.mark.parametrize("reentrant", [False, True])
def test_fine_tuning_with_gradient_checkpointing_is_recorded_once(model: Any, tmp_path: Path, reentrant: bool) -> None:
    record_model(model, PROMPTS.tolist(), tmp_path / "plain", name="x", tokenizer="x")
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    tokens_BS = torch.from_numpy(PROMPTS)
    mask_BS = torch.ones_like(tokens_BS)
    mask_BS[1, 7:] = 0
    with moeplan.traces.record(model, tmp_path / "t"):
        model(input_ids=tokens_BS, attention_mask=mask_BS, labels=tokens_BS).loss.backward()
    batch, plain = read(tmp_path / "t"), read(tmp_path / "plain")
    np.testing.assert_array_equal(batch.ids, plain.ids[mask_BS.flatten().bool().numpy()])
    assert set(batch.phase.tolist()) == {2}


def test_generation_continues_its_samples_and_is_told_from_prefill(model: Any, tmp_path: Path) -> None:
    tokens_BS = torch.from_numpy(PROMPTS)
    mask_BS = torch.ones_like(tokens_BS)
    mask_BS[0, :4] = 0
    with moeplan.traces.record(model, tmp_path / "t"):
        whole = model.generate(tokens_BS, attention_mask=mask_BS, max_new_tokens=4, do_sample=False)
        model(tokens_BS)
    batch = read(tmp_path / "t")
    lengths = [8, 12, 12]
    for sample, (length, row) in enumerate(zip(lengths, whole.tolist(), strict=True)):
        rows = batch.sample == sample
        assert batch.position[rows].tolist() == [*range(length + 3)]
        assert batch.phase[rows].tolist() == [0] * length + [1] * 3
        record_model(model, [row[12 - length : -1]], tmp_path / str(sample), name="x", tokenizer="x")
        np.testing.assert_array_equal(batch.ids[rows], read(tmp_path / str(sample)).ids)
    assert set(batch.sample.tolist()) == {*range(6)}
