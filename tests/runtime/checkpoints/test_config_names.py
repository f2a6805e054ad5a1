"""Names of experts in configurations: renamed where they are written out, refused where a pattern chooses by number."""

import json
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError
from moeplan.runtime.checkpoints import permute, undo
from tests.runtime.checkpoints.made_checkpoints import CONFIG, expert_tensors, files_of, plan_of, spec, write_checkpoint

ROWS = [[2, 3, 0, 1], [1, 3, 0, 2]]  # old expert 0 of layer 0 is the new 2, of layer 1 also the new 2
PLAN = plan_of(spec(), ROWS)
TENSORS = expert_tensors((0, 1), 4) | expert_tensors((0,), 4, stem="mtp.layers")
RENAMED = {
    "model.layers.0.mlp.experts.0.down_proj": "model.layers.0.mlp.experts.2.down_proj",
    "layers.1.mlp.experts.3": "layers.1.mlp.experts.1",
    "language_model.model.layers.0.mlp.experts.1.up_proj.weight": "language_model.model.layers.0.mlp.experts.3"
    ".up_proj.weight",
    "model.layers.1.mlp.experts.0.*": "model.layers.1.mlp.experts.2.*",
}
KEPT = (
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.gate",
    "model.layers.0.mlp.shared_expert.up_proj",
    "model.layers.0.mlp.experts",
    "model.layers.0.mlp.experts.w13",
    "mtp.layers.0.mlp.experts.0.down_proj",
    "model.mtp.layers.0.mlp.experts.0.down_proj",
    "model.layers.2.mlp.experts.0.down_proj",
    "re:.*experts.*",
    "re:.*mlp.experts.*.(gate|up|down)_proj$",
    r"re:.*mlp\.experts\.\d+\.down_proj.*",
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
    "re:.*experts.*5",
    "re:.*experts..*5.down_proj",
    "re:.*experts...down_proj",
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
    config = json.loads((tmp_path / "permuted" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == [*RENAMED.values(), *KEPT]
    assert config["quantization_config"]["modules"] == {
        name: {"bits": number} for number, name in enumerate(RENAMED.values())
    }
    other = json.loads((tmp_path / "permuted" / "hf_quant_config.json").read_text())
    assert other["exclude_modules"] == [*RENAMED.values(), *KEPT]
    other = json.loads((tmp_path / "permuted" / "quant_model_description.json").read_text())
    assert list(other) == list(RENAMED.values())
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
def test_a_pattern_that_chooses_among_experts_is_refused_before_tensors_are_copied(
    pattern: str, tmp_path: Path
) -> None:
    source = _source(tmp_path, {"quantization_config": {"modules_to_not_convert": [pattern]}})
    told = [0]
    with pytest.raises(InputError, match="chooses among experts by a pattern") as refused:
        permute(PLAN, source, tmp_path / "permuted", on_progress=lambda done, _: told.append(done))
    assert repr(pattern)[1:-1] in str(refused.value)
    assert max(told) < (source / "model.safetensors").stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_name_written_with_escapes_is_refused(tmp_path: Path) -> None:
    source = _source(tmp_path, {})
    name = r'{"model_type": "x", "a": "model\u002elayers.0.mlp.experts.0"}'
    (source / "quantize_config.json").write_text(name)
    with pytest.raises(InputError, match="is written with escapes"):
        permute(PLAN, source, tmp_path / "permuted")
