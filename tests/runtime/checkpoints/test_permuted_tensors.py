"""Tensors of layouts that no small model is saved in, and names of experts in configurations: where each goes."""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError
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


def _assert_permuted(tensors: Tensors, tmp_path: Path, shards: int = 2) -> None:
    """Permuting gives what is expected by hand and stores what it did, and undoing gives every byte."""
    source = write_checkpoint(tmp_path / "source", tensors, shards=shards)
    permute(PLAN, source, tmp_path / "permuted")
    assert_same(read_tensors(tmp_path / "permuted"), permuted_by_hand(tensors, PLAN))
    record = json.loads((tmp_path / "permuted" / "moeplan-permutation.json").read_text())
    assert record["plan_sha256"] == PLAN.plan_sha256
    assert record["permutation"] == {"0": [0, 2, 1, 3], "1": [1, 3, 0, 2]}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files_of(source).items()}
    assert {name: file["sha256"] for name, file in record["files"].items()} == hashes
    assert undo(tmp_path / "permuted", tmp_path / "restored").changed == ()
    assert files_of(tmp_path / "restored") == files_of(source)


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


def test_other_files_are_copied_and_weights_in_another_form_are_not(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4))
    for name in ("original/model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", ".git/config"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    (source / "extra").mkdir()
    (tmp_path / "blob").write_text("text")
    (source / "extra" / "chat.jinja").symlink_to(tmp_path / "blob")  # as in a cache
    made = permute(PLAN, source, tmp_path / "permuted")
    assert made.left_out == ("model.safetensors.index.json", "original/model.safetensors", "pytorch_model.bin")
    assert not (tmp_path / "permuted" / "extra" / "chat.jinja").is_symlink()
    there = files_of(tmp_path / "permuted")
    kept = {"config.json", "extra/chat.jinja", "model.safetensors", "tokenizer.json"}
    assert there.keys() == {*kept, "moeplan-permutation.json"}
    assert there["tokenizer.json"] == (source / "tokenizer.json").read_bytes()


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


TENSORS = expert_tensors((0, 1), 4) | expert_tensors((0,), 4, stem="mtp.layers")
RENAMED = {  # expert 1 of layer 0 is the new 2, and 2 the new 1; 0 and 3 of layer 1 are the new 2 and 1
    "model.layers.0.mlp.experts.1.down_proj": "model.layers.0.mlp.experts.2.down_proj",
    "layers.1.mlp.experts.3": "layers.1.mlp.experts.1",
    "text.model.layers.0.mlp.experts.2.up_proj.weight": "text.model.layers.0.mlp.experts.1.up_proj.weight",
    "model.layers.1.mlp.experts.0.*": "model.layers.1.mlp.experts.2.*",
}
KEPT = (
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.gate",
    "model.layers.0.mlp.shared_expert.up_proj",
    "model.layers.0.mlp.experts",
    "model.layers.0.mlp.experts.w13",
    "mtp.layers.0.mlp.experts.1.down_proj",
    "model.mtp.layers.0.mlp.experts.1.down_proj",
    "model.layers.2.mlp.experts.1.down_proj",
    "re:.*experts.*",
    "re:.*mlp.experts.*.(gate|up|down)_proj$",
    r"re:.*\.layers\.(0|1)\.mlp\.experts\.[0-9]+\.w1",
    "*experts*",
    "a mixture of experts 3",
    "Of 8 experts. Two are used.",
    "num_experts_3",
)
CHOOSING = (
    r"re:.*mlp\.experts\.3\..*",
    r"re:.*experts\.(0|1)\..*",
    r"re:.*experts\.[0-3]\.down_proj",
    r"re:.*experts\.\d\.down_proj",
    r"re:.*experts\.(a|1)\.down_proj",
    r"re:.*experts\..\.down_proj",
    "re:.*experts..*5.down_proj",
    "*.experts.3.*",
    "model.layers.*.mlp.experts.0",
    "re:.*experts.1*",
    "model.layers.0.mlp.experts.1|model.layers.1.mlp.experts.1",
    "model.layers.0.mlp.experts.1, model.layers.0.mlp.experts.2",
    r"re:.*experts\.3\..* ",
)


def _source(tmp_path: Path, config: dict[str, Any]) -> Path:
    return write_checkpoint(tmp_path / "source", TENSORS, CONFIG | config)


def test_names_written_out_are_renamed_and_all_else_is_kept(tmp_path: Path) -> None:
    ignore = [*RENAMED, *KEPT]
    bits = {name: {"bits": number} for number, name in enumerate(RENAMED)}
    source = _source(tmp_path, {"quantization_config": {"ignore": ignore, "modules": bits}})
    (source / "hf_quant_config.json").write_text(json.dumps({"exclude_modules": ignore}))
    (source / "quant_model_description.json").write_text(json.dumps(bits))  # as vllm-ascend has it
    permute(PLAN, source, tmp_path / "permuted")
    names = ("config.json", "hf_quant_config.json", "quant_model_description.json")
    config, quantised, described = (json.loads((tmp_path / "permuted" / name).read_text()) for name in names)
    ignored, modules = [*RENAMED.values(), *KEPT], dict(zip(RENAMED.values(), bits.values(), strict=True))
    assert config["quantization_config"] == {"ignore": ignored, "modules": modules}
    assert quantised["exclude_modules"] == ignored
    assert described == modules
    assert CONFIG.items() <= config.items()
    assert undo(tmp_path / "permuted", tmp_path / "restored").changed == ()
    assert files_of(tmp_path / "restored") == files_of(source)


@pytest.mark.parametrize(
    "written", ['{{"model_type": "x",\r\n\t"a" : "{0}"}}', '{{"model_type":"x","a":["{0}"],"é":"é"}}  ']
)
def test_a_configuration_keeps_the_form_in_which_it_was_written(written: str, tmp_path: Path) -> None:
    source = _source(tmp_path, {})
    old, new = next(iter(RENAMED.items()))
    (source / "quantize_config.json").write_bytes(written.format(old).encode())
    permute(PLAN, source, tmp_path / "permuted")
    assert (tmp_path / "permuted" / "quantize_config.json").read_bytes() == written.format(new).encode()


@pytest.mark.parametrize("pattern", CHOOSING)
def test_a_pattern_that_chooses_among_experts_is_refused_before_any_copy(pattern: str, tmp_path: Path) -> None:
    source = _source(tmp_path, {"quantization_config": {"modules_to_not_convert": [pattern]}})
    told = [0]
    with pytest.raises(InputError, match="chooses among experts by a pattern") as refused:
        permute(PLAN, source, tmp_path / "permuted", on_progress=lambda done, _: told.append(done))
    assert repr(pattern)[1:-1] in str(refused.value)
    assert max(told) < (source / "model.safetensors").stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_name_written_with_escapes_is_refused(tmp_path: Path) -> None:
    source = _source(tmp_path, {})
    name = r'{"model_type": "x", "a": "model\u002elayers.0.mlp.experts.1"}'
    (source / "quantize_config.json").write_text(name)
    with pytest.raises(InputError, match="is written with escapes"):
        permute(PLAN, source, tmp_path / "permuted")
