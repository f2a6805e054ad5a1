"""Small random models of every family that a checkpoint can be permuted of, with every weight and bias of some size."""

from typing import Any

import torch
from torch import Tensor

from tests.traces.huggingface.families import FAMILIES as TRACED
from tests.traces.huggingface.families import SIZES, VOCABULARY

STD = 0.15
TEXT: dict[str, Any] = {**SIZES, "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2}
TEXT |= {"intermediate_size_mlp": 24, "interleave_moe_layer_step": 2, "attn_temperature_tuning": False}
PROJECTED = ("projector_input_dim", "projector_output_dim", "vision_output_dim")
VISION = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14} | dict.fromkeys(PROJECTED, 16)
MULTIMODAL = {"text_config": TEXT, "vision_config": VISION, "boi_token_index": 3, "eoi_token_index": 4}
SMALL = {"head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 6}
DEEP: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
QWEN_VL = {"text_config": {**SIZES, **SMALL}, "vision_config": {**DEEP, "deepstack_visual_indexes": [0]}}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (f"{prefix}ForCausalLM", sizes) for family, (prefix, sizes) in TRACED.items()},
    "minimax_m2": ("MiniMaxM2ForCausalLM", {**SMALL, "rotary_dim": 4}),
    "jamba": ("JambaForCausalLM", {**SMALL, "attn_layer_period": 1, "attn_layer_offset": 0}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", {**SMALL, "num_dense_layers": 1, "layer_types": ["full_attention"] * 4}),
    "llama4_text": ("Llama4ForCausalLM", TEXT),
    "llama4": ("Llama4ForConditionalGeneration", MULTIMODAL),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", QWEN_VL),
}


def make_model(family: str, **changes: Any) -> Any:
    """A model of a family, its weights drawn with one width, whose routers choose without ties."""
    import transformers

    architecture, sizes = FAMILIES[family]
    config: Any = transformers.AutoConfig.for_model(
        family, **(sizes if "text_config" in sizes else {**SIZES, **sizes, **changes}), architectures=[architecture]
    )
    kind: Any = getattr(transformers, architecture)
    model = kind(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *_biases(model)]:
            noise = STD * torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + noise if "norm" in name else noise)
    return model


def logits_of(model: Any) -> Tensor:
    """The logits of two random texts."""
    tokens = torch.randint(5, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens).logits
    return logits


def _biases(model: Any) -> list[tuple[str, Tensor]]:
    """Biases that are chosen by, no parameters."""
    return [(name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name]
