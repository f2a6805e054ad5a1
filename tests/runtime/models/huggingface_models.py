"""Small random models of the four families, with every weight, bias and sink of some size."""

import contextlib
from importlib import import_module
from typing import Any

import torch
from torch import nn

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = 5  # shorter than the texts of the tests

with contextlib.suppress(ImportError):  # here, not in every rank
    for name in FAMILIES:
        import_module(f"transformers.models.{name}.modeling_{name}")


def make_model(family: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """A model in float64 and eval mode: "mixtral", "qwen3_moe", "olmoe" or "gpt_oss"."""
    import transformers

    window = {"sliding_window": WINDOW}
    qwen = {"num_experts": 6, "head_dim": 16, "moe_intermediate_size": 12, "attention_bias": True, **window}
    own: dict[str, dict[str, Any]] = {
        "mixtral": {"num_local_experts": 6, "head_dim": 16, **window},
        "qwen3_moe": {**qwen, "mlp_only_layers": [1], "use_sliding_window": True},
        "olmoe": {"num_experts": 6, "attention_bias": True, "clip_qkv": 0.4},
        "gpt_oss": {"num_local_experts": 6, "head_dim": 16, **window, "layer_types": LAYER_TYPES},
    }
    eager = {"experts_implementation": "eager"}  # its grouped product takes no float64
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **eager, **own[family], **changes})
    build: Any = transformers.AutoModelForCausalLM.from_config
    model: nn.Module = build(config).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.15 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + noise if "norm" in name else noise)
    return model


def on_meta(model: Any) -> nn.Module:
    """The same model without weights."""
    with torch.device("meta"):
        empty: nn.Module = type(model)(model.config)
    return empty.to(torch.float64).eval()


def names_of_experts(model: nn.Module) -> list[str]:
    """The paths of its modules of stacked experts, by layer."""
    return [name for name, _ in model.named_modules() if name.endswith(".experts")]
