"""Models of every family, quantised ones too: equal logits from the permuted checkpoint, every tensor where it belongs.

A quantised model is read dequantised, in float32: a bf16 router ties now and then, and a permutation breaks ties
otherwise.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from moeplan.errors import UsageError
from moeplan.runtime.checkpoints import Permuted, permute, undo
from moeplan.runtime.plan import Plan
from moeplan.traces.huggingface.config import spec_of_config
from tests.runtime.checkpoints.made_checkpoints import (
    INDEX,
    Tensors,
    assert_same,
    files_of,
    permuted_by_hand,
    plan_of,
    random_plan,
    read_tensors,
)
from tests.runtime.checkpoints.permuted_families import FAMILIES, logits_of, make_model

GROUPED = ("deepseek_v2", "deepseek_v3", "glm4_moe")
SKIPPED = ["lm_head", *(f"model.layers.{layer}.{part}" for layer in range(4) for part in ("self_attn", "mlp.gate"))]
SKIPPED += ["model.layers.0.mlp", "model.layers.1.mlp", *(f"model.layers.{i}.mlp.shared_experts" for i in (2, 3))]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8 |= {"modules_to_not_convert": SKIPPED}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def fp8(tensors: Tensors) -> Tensors:
    """The experts' matrices in 8 bits, with a scale each."""
    quantised = dict(tensors)
    for name, tensor in tensors.items():
        if ".experts." in name:
            scale = tensor.float().abs().max() / 448
            quantised[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            quantised[f"{name}_scale_inv"] = scale.view(1, 1)
    return quantised


def mxfp4(tensors: Tensors) -> Tensors:
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


QUANTISED: dict[str, tuple[str, Callable[[Tensors], Tensors], dict[str, Any]]] = {
    "fp8": ("deepseek_v3", fp8, FP8),
    "mxfp4": ("gpt_oss", mxfp4, MXFP4),
}


@dataclass(frozen=True)
class Case:
    """A model of a family, its checkpoint, a plan and the checkpoint permuted by it."""

    name: str
    kind: type[Any]
    source: Path
    plan: Plan
    permuted: Permuted

    def loaded(self, folder: Path) -> Any:
        """The model in a directory, in float32."""
        import transformers

        dequantised: Any = transformers.FineGrainedFP8Config
        how = {"quantization_config": dequantised(dequantize=True, modules_to_not_convert=SKIPPED)}
        dtype = torch.bfloat16 if self.name in QUANTISED else torch.float32
        return self.kind.from_pretrained(folder, dtype=dtype, **(how if self.name == "fp8" else {})).float().eval()


@pytest.fixture(scope="module", params=[*FAMILIES, *QUANTISED])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One family after another, in small shards, then the quantised ones."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    source = folder / "source"
    if name in QUANTISED:
        family, quantise, quantisation = QUANTISED[name]
        model = make_model(family, intermediate_size=32).bfloat16()
        model.save_pretrained(source)
        file, config = source / "model.safetensors", source / "config.json"
        save_file(quantise(load_file(file)), file, metadata={"format": "pt"})
        config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantisation}))
    else:
        model = make_model(name)
        model.save_pretrained(source, max_shard_size="24KB")
    plan = random_plan(spec_of_config(source / "config.json"))
    if name in FAMILIES:
        named = json.loads((source / INDEX).read_text())["weight_map"]
        assert len({file for tensor, file in named.items() if f"layers.{plan.model.layer_ids[0]}." in tensor}) > 1
    return Case(name, type(model), source, plan, permute(plan, source, folder / "permuted"))


def test_the_logits_are_those_of_the_original_and_others_with_a_router_in_the_old_order(case: Case) -> None:
    original, permuted = case.loaded(case.source), case.loaded(case.permuted.directory)
    torch.testing.assert_close(logits_of(permuted), logits_of(original), atol=1e-5, rtol=0)
    routers = (".gate.weight", ".router.weight", ".router.layer.weight")
    name = next(name for name, _ in original.named_parameters() if name.endswith(routers))
    with torch.no_grad():
        permuted.get_parameter(name).copy_(original.get_parameter(name))
    assert (logits_of(permuted) - logits_of(original)).abs().max() > 0.1


def test_every_tensor_is_what_a_permutation_by_hand_makes_of_it(case: Case) -> None:
    expected = permuted_by_hand(read_tensors(case.source), case.plan)
    assert_same(read_tensors(case.permuted.directory), expected)
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in read_tensors(case.source).items())


def test_undone_every_file_is_what_it_was_byte_for_byte(case: Case, tmp_path: Path) -> None:
    restored = undo(case.permuted.directory, tmp_path / "restored")
    assert restored.changed == ()
    assert files_of(tmp_path / "restored") == files_of(case.source)


def test_groups_torn_apart_are_refused_where_the_model_chooses_among_groups(case: Case, tmp_path: Path) -> None:
    if case.name not in (*GROUPED, "fp8"):
        assert case.plan.model.top_k_groups is None
        return
    row = [0, 2, 4, 6, 1, 3, 5, 7]
    torn = plan_of(case.plan.model, [row] * case.plan.model.num_layers)
    with pytest.raises(UsageError, match=r"tears groups of experts apart.* --groups whole"):
        permute(torn, case.source, tmp_path / "torn")
    assert not list(tmp_path.iterdir())
