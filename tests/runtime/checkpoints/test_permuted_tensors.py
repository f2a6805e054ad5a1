"""Tensors of layouts that no small model is saved in, in any order: where a permutation puts each, byte for byte."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.runtime.checkpoints import permute, rewriting, undo
from tests.runtime.checkpoints.made_checkpoints import (
    CONFIG,
    PLAN,
    Tensors,
    assert_same,
    expert_tensors,
    files_of,
    permuted_by_hand,
    plan_of,
    read_tensors,
    spec,
    write_checkpoint,
)


def _drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random bytes as a tensor of any type."""
    size = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def _assert_permuted(tensors: Tensors, tmp_path: Path, config: dict[str, object] = CONFIG, shards: int = 2) -> None:
    """Permuting gives what is expected by hand, and undoing every byte."""
    source = write_checkpoint(tmp_path / "source", tensors, config, shards=shards)
    permute(PLAN, source, tmp_path / "permuted")
    assert_same(read_tensors(tmp_path / "permuted"), permuted_by_hand(tensors, PLAN))
    assert undo(tmp_path / "permuted", tmp_path / "restored").changed == ()
    assert files_of(tmp_path / "restored") == files_of(source)


def test_fp8_weights_keep_their_scales_and_correction_biases_follow_the_router(tmp_path: Path) -> None:
    tensors = expert_tensors((0, 1), 4)
    for name in list(tensors):
        if ".experts." in name:
            tensors[name] = _drawn(8, 8, dtype=torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.randn(1, 1)
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = torch.randn(4)
    _assert_permuted(tensors, tmp_path)


def test_mxfp4_blocks_and_scales_and_biases_are_put_in_order_by_their_first_axis(tmp_path: Path) -> None:
    tensors = {"lm_head.weight": _drawn(16, 8, dtype=torch.bfloat16)}
    for layer in (0, 1):
        stem = f"model.layers.{layer}.mlp"
        for part, size in (("gate_up_proj", 12), ("down_proj", 8)):
            tensors[f"{stem}.experts.{part}_blocks"] = _drawn(4, size, 2, 16, dtype=torch.uint8)
            tensors[f"{stem}.experts.{part}_scales"] = _drawn(4, size, 2, dtype=torch.uint8)
            tensors[f"{stem}.experts.{part}_bias"] = _drawn(4, size, dtype=torch.bfloat16)
        tensors[f"{stem}.router.weight"] = _drawn(4, 8, dtype=torch.bfloat16)
        tensors[f"{stem}.router.bias"] = _drawn(4, dtype=torch.bfloat16)
    _assert_permuted(tensors, tmp_path, CONFIG | {"model_type": "gpt_oss"})


def test_tensors_that_number_experts_hold_the_new_numbers(tmp_path: Path) -> None:
    tensors = expert_tensors((0, 1), 4, block="ffn", stem="layers")
    tensors["layers.0.ffn.gate.tid2eid"] = torch.randint(0, 4, (16, 2))
    tensors["layers.1.ffn.gate.tid2eid"] = torch.randint(0, 4, (16, 2), dtype=torch.int32)
    tensors["layers.1.ffn.gate.bias"] = torch.randn(4)
    _assert_permuted(tensors, tmp_path)


def test_what_is_copied_in_many_pieces_is_put_together_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "BUFFER_BYTES", 24)
    tensors = {"layers.0.ffn.gate.tid2eid": torch.randint(0, 4, (7, 3)), "embed.weight": torch.randn(5, 5)}
    for layer in (0, 1):
        tensors[f"layers.{layer}.ffn.experts.down_proj"] = _drawn(4, 5, 7, dtype=torch.uint8)
        tensors[f"layers.{layer}.ffn.gate.weight"] = torch.randn(4, 5)
    _assert_permuted(tensors, tmp_path)


def test_layers_that_predict_further_tokens_stay_as_they_are(tmp_path: Path) -> None:
    tensors = expert_tensors((0, 1, 2), 4) | expert_tensors((0,), 4, stem="mtp.layers", seed=1)
    source = write_checkpoint(tmp_path / "source", tensors)
    made = permute(PLAN, source, tmp_path / "permuted")
    after = read_tensors(tmp_path / "permuted")
    assert_same(after, permuted_by_hand(tensors, PLAN))
    assert made.left_alone == ("model.layers.2", "mtp.layers.0")
    for name in tensors:
        if "layers.2." in name or "mtp." in name:
            assert torch.equal(after[name], tensors[name])


def test_one_number_for_all_experts_stays_and_biases_with_a_leading_one_are_put_in_order(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.experts.down_proj_input_scale": torch.tensor(3.0)}
    tensors |= {f"model.layers.{layer}.mlp.experts.down_proj": torch.randn(4, 6, 8) for layer in (0, 1)}
    tensors |= {f"model.layers.{layer}.mlp.gate.weight": torch.randn(4, 8) for layer in (0, 1)}
    bias = torch.arange(4.0).view(1, 4)
    source = write_checkpoint(
        tmp_path / "source", tensors | {"model.layers.1.mlp.moe_statics.e_score_correction_bias": bias}
    )
    permute(PLAN, source, tmp_path / "permuted")
    after = read_tensors(tmp_path / "permuted")
    assert after["model.layers.1.mlp.moe_statics.e_score_correction_bias"].tolist() == [[1, 3, 0, 2]]
    assert after["model.layers.0.mlp.experts.down_proj_input_scale"] == 3


def test_quantised_experts_of_any_suffix_are_renamed_whole(tmp_path: Path) -> None:
    tensors = expert_tensors((0, 1), 4)
    for name in [name for name in tensors if ".experts." in name]:
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}{part}": torch.randn(2) for part in ("qweight", "qzeros", "g_idx", "lora_A.weight", "bias")}
    _assert_permuted(tensors, tmp_path, shards=3)


def test_links_into_a_cache_are_followed_and_written_as_files(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", expert_tensors((0, 1), 4), shards=2)
    snapshot = tmp_path / "models--x" / "snapshots" / "a1"
    (tmp_path / "models--x" / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(whole.iterdir())):
        shutil.copy(file, tmp_path / "models--x" / "blobs" / str(number))
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", str(number)))
    permute(PLAN, snapshot, tmp_path / "permuted")
    assert not any(file.is_symlink() for file in (tmp_path / "permuted").iterdir())
    permute(PLAN, whole, tmp_path / "other")
    assert files_of(tmp_path / "permuted") == files_of(tmp_path / "other")


def test_other_files_are_copied_and_weights_in_another_form_are_not(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4))
    for name in ("original/model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", ".git/config"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    (source / "extra").mkdir()
    (source / "extra" / "chat.jinja").write_text("text")
    made = permute(PLAN, source, tmp_path / "permuted")
    assert made.left_out == ("model.safetensors.index.json", "original/model.safetensors", "pytorch_model.bin")
    there = files_of(tmp_path / "permuted")
    assert there.keys() == {
        "config.json",
        "extra/chat.jinja",
        "model.safetensors",
        "moeplan-permutation.json",
        "tokenizer.json",
    }
    assert there["tokenizer.json"] == (source / "tokenizer.json").read_bytes()


def test_the_permutation_is_stored_with_the_hashes_of_plan_and_source(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4), shards=2)
    permute(PLAN, source, tmp_path / "permuted")
    record = json.loads((tmp_path / "permuted" / "moeplan-permutation.json").read_text())
    assert record["plan_sha256"] == PLAN.plan_sha256
    assert record["permutation"] == {"0": [0, 2, 1, 3], "1": [1, 3, 0, 2]}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files_of(source).items()}
    assert {name: file["sha256"] for name, file in record["files"].items()} == hashes


def test_weights_trained_since_are_put_back_too_and_told(tmp_path: Path) -> None:
    tensors = expert_tensors((0, 1), 4)
    permute(PLAN, write_checkpoint(tmp_path / "source", tensors), tmp_path / "permuted")
    trained = {name: tensor + 1 for name, tensor in tensors.items()}
    by_hand = permuted_by_hand(trained, PLAN)
    shutil.move(tmp_path / "permuted" / "moeplan-permutation.json", tmp_path)
    shutil.rmtree(tmp_path / "permuted")
    write_checkpoint(tmp_path / "permuted", by_hand, shards=3)
    shutil.move(tmp_path / "moeplan-permutation.json", tmp_path / "permuted")
    restored = undo(tmp_path / "permuted", tmp_path / "restored")
    assert_same(read_tensors(tmp_path / "restored"), trained)
    assert "model.safetensors" in restored.changed
    assert "config.json" not in restored.changed


@given(data=st.data())
@settings(max_examples=25)
def test_any_order_of_any_number_of_experts_in_any_files_is_carried_out_and_undone(data: st.DataObject) -> None:
    num_experts = data.draw(st.sampled_from([2, 4, 12]))
    layers = data.draw(st.sets(st.integers(0, 11), min_size=1, max_size=3).map(sorted))
    rows = [data.draw(st.permutations(range(num_experts))) for _ in layers]
    shards = data.draw(st.integers(1, 4))
    tensors = expert_tensors(layers, num_experts)
    plan = plan_of(spec(num_experts, layers, num_hidden_layers=12), rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = CONFIG | {"num_experts": num_experts, "num_hidden_layers": 12}
        source = write_checkpoint(folder / "source", tensors, config, shards=shards)
        permute(plan, source, folder / "permuted")
        assert_same(read_tensors(folder / "permuted"), permuted_by_hand(tensors, plan))
        undo(folder / "permuted", folder / "restored")
        assert files_of(folder / "restored") == files_of(source)
