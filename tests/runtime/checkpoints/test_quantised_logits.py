"""Quantised models, as transformers reads them: the same logits from the permuted checkpoint, ties apart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from moeplan.runtime.checkpoints import permute
from moeplan.traces.huggingface.config import spec_of_config
from tests.runtime.checkpoints.made_checkpoints import Tensors, random_plan
from tests.runtime.checkpoints.permuted_families import logits_of, make_model

SKIPPED = ["lm_head", *(f"model.layers.{layer}.{part}" for layer in range(4) for part in ("self_attn", "mlp.gate"))]
SKIPPED += ["model.layers.0.mlp", "model.layers.1.mlp", *(f"model.layers.{i}.mlp.shared_experts" for i in (2, 3))]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8 |= {"modules_to_not_convert": SKIPPED}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def _fp8(tensors: Tensors) -> Tensors:
    """The experts' matrices in 8 bits, with a scale each."""
    quantised = dict(tensors)
    for name, tensor in tensors.items():
        if ".experts." in name:
            scale = tensor.float().abs().max() / 448
            quantised[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            quantised[f"{name}_scale_inv"] = scale.view(1, 1)
    return quantised


def _mxfp4(tensors: Tensors) -> Tensors:
    """Random blocks of 4 bits, with a scale each, for the experts' matrices."""
    generator, quantised = torch.Generator().manual_seed(0), {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inner, outer = tensor.shape
            shape = (experts, outer, inner // 32)
            quantised[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            quantised[f"{name}_scales"] = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        else:
            quantised[name] = tensor
    return quantised


@pytest.mark.parametrize(
    ("family", "quantise", "config"), [("deepseek_v3", _fp8, FP8), ("gpt_oss", _mxfp4, MXFP4)], ids=["fp8", "mxfp4"]
)
def test_logits_are_those_of_the_original_and_a_router_left_changes_them(
    family: str, quantise: Callable[[Tensors], Tensors], config: dict[str, Any], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    model = make_model(family, intermediate_size=32).bfloat16()
    model.save_pretrained(source)
    save_file(
        quantise(load_file(source / "model.safetensors")), source / "model.safetensors", metadata={"format": "pt"}
    )
    described = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (source / "config.json").write_text(json.dumps(described))
    permute(random_plan(spec_of_config(source / "config.json")), source, tmp_path / "permuted")
    original, permuted = (_loaded(type(model), tmp_path / name, config) for name in ("source", "permuted"))
    torch.testing.assert_close(logits_of(permuted), logits_of(original), atol=1e-5, rtol=0)
    name = next(name for name, _ in original.named_parameters() if name.endswith(("gate.weight", "router.weight")))
    with torch.no_grad():
        permuted.get_parameter(name).copy_(original.get_parameter(name))
    assert (logits_of(permuted) - logits_of(original)).abs().max() > 0.1


def _loaded(kind: Any, folder: Path, config: dict[str, Any]) -> Any:
    """A model dequantised, in float32: a bf16 router ties now and then, and a permutation breaks ties otherwise."""
    import transformers

    read: dict[str, Any] = {}
    if config is FP8:
        dequantised: Any = transformers.FineGrainedFP8Config
        read = {"quantization_config": dequantised(dequantize=True, modules_to_not_convert=SKIPPED)}
    return kind.from_pretrained(folder, dtype=torch.bfloat16, **read).float().eval()
