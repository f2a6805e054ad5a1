"""A config.json says of a model what the model itself says, for every family and for the files of its authors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError
from moeplan.traces.huggingface.checkpoint import load_model
from moeplan.traces.huggingface.config import spec_of_config
from moeplan.traces.recording.layers import moe_layers, spec_of
from tests.traces.huggingface.families import FAMILIES

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1, "hidden_size": 7168, "moe_intermediate_size": 2048, "torch_dtype": "bfloat16",
    "n_shared_experts": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128,
}  # fmt: skip
SMALL = {"model_type": "any", "num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2}


def written(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_tells_what_the_loaded_model_tells(checkpoint: Callable[..., Path], family: str) -> None:
    folder = checkpoint(family)
    model = load_model(folder, device="cpu")
    loaded = spec_of(model, moe_layers(model), name="same")
    # How many experts are shared, some configurations leave to the modules.
    found = replace(spec_of_config(folder / "config.json"), name="same", num_shared_experts=loaded.num_shared_experts)
    assert found == loaded


def test_deepseek_v3_as_its_authors_wrote_it(tmp_path: Path) -> None:
    spec = spec_of_config(written(tmp_path, DEEPSEEK_V3))
    assert spec.layer_ids == tuple(range(3, 61))
    assert (spec.num_experts, spec.top_k) == (256, 8)
    assert (spec.num_expert_groups, spec.top_k_groups, spec.num_mtp_layers) == (8, 4, 1)
    assert (spec.dtype_bytes, spec.attention.kv_size, spec.ffn_size) == (2, 576, 2048)


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        ({"interleave_moe_layer_step": 2}, (1, 3, 5)),
        ({"interleave_moe_layer_step": 2, "moe_layers": [0, 4]}, (0, 4)),
        ({"expert_layer_period": 3, "expert_layer_offset": 1}, (1, 4)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2}, (1, 3)),
        ({"moe_layer_start_index": 4, "moe_layer_end_index": -1}, (4, 5)),
        ({"num_dense_layers": 4}, (4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"first_k_dense_replace": 0, "moe_layer_freq": [0, 0, 0, 1, 1, 1]}, (3, 4, 5)),
        ({"mlp_layer_types": ["dense", "sparse"] * 3, "first_k_dense_replace": 0}, (1, 3, 5)),
        ({"hybrid_override_pattern": "ME*-EM"}, (1, 4)),
        ({"layers_block_type": ["mamba", "attention"] * 3, "expert_layer_period": 2}, (0, 2, 4)),
    ],
)
def test_the_layers_with_experts_of_each_way_to_say_so(
    tmp_path: Path, keys: dict[str, Any], layers: tuple[int, ...]
) -> None:
    assert spec_of_config(written(tmp_path, SMALL | keys)).layer_ids == layers


def test_the_text_part_of_a_model_of_images_is_read(tmp_path: Path) -> None:
    text = {key: value for key, value in SMALL.items() if key != "model_type"}
    found = spec_of_config(written(tmp_path, {"model_type": "x", "torch_dtype": "float16", "text_config": text}))
    assert (found.num_experts, found.dtype_bytes) == (8, 2)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "config.json"),
        ([], "no model_type"),
        ({"model_type": 3}, "no model_type"),
        ({"model_type": "x"}, "number of experts"),
        (SMALL | {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (SMALL | {"num_hidden_layers": True}, "num_hidden_layers"),
        (SMALL | {"num_experts": 1, "num_experts_per_tok": 5}, "top-k"),
        (SMALL | {"decoder_sparse_step": "two"}, "which layers"),
        (SMALL | {"expert_layer_period": 0}, "layer"),
        (SMALL | {"moe_layers": 3}, "which layers"),
        (SMALL | {"mlp_layer_types": ["dense"] * 6}, "0 MoE layer ids"),
        (SMALL | {"first_k_dense_replace": None, "moe_layer_start_index": {}}, "which layers"),
    ],
)
def test_what_is_no_configuration_of_experts_is_refused_in_one_line(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        spec_of_config(written(tmp_path, config))
    assert "\n" not in str(refused.value)
