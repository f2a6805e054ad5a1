"""The families of models that are tried, each with the sizes of a small one."""

from typing import Any

__all__ = ["FAMILIES", "SIZES", "VOCABULARY"]

VOCABULARY = 48
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
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
