"""A Hugging Face config.json, read as JSON: the model that an engine serves, without its weights and transformers."""

import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from ...errors import InputError
from ...files import read_json
from ..model import MAX_LAYERS, ModelSpec
from ..recording.layers import sizes_of

MAX_BYTES = 4 * 2**20
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
SPARSE = ("sparse", "moe", "hash_moe", "E")  # what lists of layer kinds call a layer of experts

Rule = Callable[[Mapping[str, Any]], Callable[[int], bool]]  # of a configuration: whether a layer has experts


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The text part of a configuration, an object.

    Raises InputError where it is damaged, too large or no configuration of a model.
    """
    whole = read_json(path, what="the configuration of a model", max_bytes=MAX_BYTES)
    if not (isinstance(whole, dict) and isinstance(whole.get("model_type"), str)):
        raise InputError(f"{path}: no model_type; expected a Hugging Face model's config.json")
    text = whole.get("text_config")
    return whole | text if isinstance(text, dict) else whole


def check_layers(path: str | os.PathLike[str], layers: Any) -> None:
    """Refuse a number of hidden layers that is none, or absurd."""
    if not (isinstance(layers, int) and 1 <= layers <= MAX_LAYERS):
        raise InputError(f"{path}: num_hidden_layers {layers!r}; expected 1 to {MAX_LAYERS:,}")


def spec_of_config(path: str | os.PathLike[str]) -> ModelSpec:
    """The model that a config.json describes, its MoE layers among all hidden layers.

    Raises InputError where it is no configuration, or not of a model with experts.
    """
    config = read_config(path)
    sizes = sizes_of(SimpleNamespace(**config))
    for name, what in (("num_experts", "number of experts"), ("top_k", "number of experts per token")):
        if sizes[name] is None:
            raise InputError(f"{path}: no {what}; expected the config.json of a Mixture-of-Experts model")
    layers: Any = sizes["num_hidden_layers"]
    check_layers(path, layers)
    try:
        moe = _moe_layers(config, layers)
        dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        name = str(config.get("_name_or_path") or config["model_type"]).rstrip("/").rpartition("/")[2]
        return ModelSpec(name=name, layer_ids=moe, dtype_bytes=DTYPE_BYTES.get(dtype), **sizes)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{path}: which layers have experts is not told in a known way ({error})") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _moe_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The hidden layers with experts, as the families' own configurations decide it."""
    rules = [rule(config) for key, rule in RULES.items() if config.get(key) is not None]
    layers_by_rule = (tuple(filter(has_experts, range(num_layers))) for has_experts in rules)
    return next(filter(None, layers_by_rule), () if rules else tuple(range(num_layers)))


def _listed(key: str) -> Rule:
    """A list of the kinds of all layers."""
    return lambda config: lambda layer: layer < len(config[key]) and config[key][layer] in SPARSE


def _deepseek(config: Mapping[str, Any]) -> Callable[[int], bool]:
    first, every = config["first_k_dense_replace"], config.get("moe_layer_freq") or 1
    if isinstance(every, list):
        return lambda layer: layer < len(every) and bool(every[layer])
    return lambda layer: layer >= first and layer % every == 0


def _qwen(config: Mapping[str, Any]) -> Callable[[int], bool]:
    dense, step = frozenset(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step") or 1
    return lambda layer: layer not in dense and (layer + 1) % step == 0


def _jamba(config: Mapping[str, Any]) -> Callable[[int], bool]:
    period, offset = config["expert_layer_period"], config.get("expert_layer_offset", 0)
    return lambda layer: layer % period == offset


def _ernie(config: Mapping[str, Any]) -> Callable[[int], bool]:
    start, step = config["moe_layer_start_index"], config.get("moe_layer_interval") or 1
    end = config.get("moe_layer_end_index")
    last = end if end is not None and end >= 0 else MAX_LAYERS
    return lambda layer: start <= layer <= last and (layer + 1) % step == 0


RULES: dict[str, Rule] = {  # the most specific first
    "mlp_layer_types": _listed("mlp_layer_types"),
    "layers_block_type": _listed("layers_block_type"),
    "hybrid_override_pattern": _listed("hybrid_override_pattern"),
    "moe_layers": lambda config: frozenset(config["moe_layers"]).__contains__,
    "interleave_moe_layer_step": lambda config: lambda layer: (layer + 1) % config["interleave_moe_layer_step"] == 0,
    "first_k_dense_replace": _deepseek,
    "moe_layer_start_index": _ernie,
    "expert_layer_period": _jamba,
    "num_dense_layers": lambda config: lambda layer: layer >= config["num_dense_layers"],
    "decoder_sparse_step": _qwen,
    "mlp_only_layers": _qwen,
}
