"""Small checkpoints of every family, randomly initialised and saved with a tokenizer of single characters."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

VOCABULARY = 48
CHARACTERS = "abcdefghijklmnopqrstuvwxyz ,.\n"
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 10}
MLA |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 6}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
        | {"head_dim": 8},
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "gpt_oss": ("GptOss", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16}),
    "deepseek_v2": (
        "DeepseekV2",
        {**MLA, **GROUPS, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1, "n_shared_experts": 2},
    ),
    "deepseek_v3": ("DeepseekV3", {**MLA, **GROUPS, "first_k_dense_replace": 2, "n_shared_experts": 1}),
    "phimoe": ("Phimoe", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4Moe", {**GROUPS, "head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 6, "num_experts_per_tok": 3}),
}


def build(family: str, **changes: Any) -> Any:
    """A model of a family with weights spread enough that no two experts of a token are near a tie."""
    import transformers

    prefix, sizes = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **sizes, **changes})
    torch.manual_seed(3)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if any(word in name for word in ("gate.weight", "router.weight", "router.bias", "e_score_correction_bias")):
                tensor.copy_(torch.randn_like(tensor) * (0.05 if "bias" in name else 1.0))
    return model.eval()


@functools.cache
def tokenizer_json() -> str:
    """A tokenizer of single characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return str(tokenizer.to_str())


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(family, **changes)`: the directory of a saved model and tokenizer, made once."""

    @functools.cache
    def make(family: str, template: str | None = None) -> Path:
        import transformers

        folder = tmp_path_factory.mktemp(family) / f"tiny-{family}"
        build(family).save_pretrained(folder)
        (folder / "raw.json").write_text(tokenizer_json())
        kind: Any = transformers.PreTrainedTokenizerFast
        tokenizer = kind(
            tokenizer_file=str(folder / "raw.json"), unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
        )
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return folder

    return make
