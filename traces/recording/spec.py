"""Specification of a model for a trace, read from its configuration and its modules."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..model import Attention, ModelSpec
from .layers import MoELayer, hidden_layers

if TYPE_CHECKING:
    from torch import nn

__all__ = ["model_config", "sizes_of", "spec_of"]

NAMES = {  # ours -> what configurations call it, the most specific first
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_top_k", "moe_k", "moe_topk", "top_k"),
    "num_hidden_layers": ("num_hidden_layers", "num_layers"),
    "num_mtp_layers": ("num_nextn_predict_layers", "num_mtp_layers"),
    "num_expert_groups": ("n_group",),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "hidden_size": ("hidden_size",),
    "ffn_size": ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_size", "intermediate_size"),
}
HEADS = ("num_attention_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", *HEADS)


def spec_of(model: "nn.Module", layers: Sequence[MoELayer], name: str | None = None) -> ModelSpec:
    """The model as its configuration (`model.config`, as in transformers) and its modules describe it.

    Parameters
    ----------
    name
        By default what the configuration says the model was loaded from, else the class.

    Raises UsageError where its experts or its top-k are not told.
    """
    config = model_config(model)
    sizes = sizes_of(config)
    for required in ("num_experts", "top_k"):
        if sizes[required] is None:
            sizes[required] = _number(layers[0].module, required)
        if sizes[required] is None:
            raise UsageError(
                f"{type(model).__name__} does not tell its {required} (no {' or '.join(NAMES[required])} in"
                " model.config); give spec=moeplan.traces.model.ModelSpec(...)"
            )
    if sizes["num_shared_experts"] is None:
        sizes["num_shared_experts"] = _shared_experts(layers[0])
    return ModelSpec(
        name=name or _name(model, config),
        layer_ids=hidden_layers(layers),
        dtype_bytes=next((p.element_size() for p in model.parameters() if p.is_floating_point()), None),
        **sizes,
    )


def sizes_of(config: Any) -> dict[str, Any]:
    """Fields of a `ModelSpec` from a configuration, all but name, layers and dtype. None where it gives nothing."""
    sizes = {ours: _number(config, *theirs) for ours, theirs in NAMES.items()}
    return sizes | {"attention": _attention(config), "top_k_groups": _limit(config)}


def model_config(model: "nn.Module") -> Any:
    """The configuration of a model's text part; of the model inside, where it is wrapped for data parallelism."""
    config: Any = getattr(getattr(model, "module", model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _number(config: Any, *names: str) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def _limit(config: Any) -> int | None:
    """The groups that a token may choose experts from, where those are not all."""
    chosen, groups = _number(config, "topk_group"), _number(config, "n_group")
    limited = chosen and groups and chosen < groups and getattr(config, "topk_method", None) != "greedy"
    return chosen if limited else None


def _name(model: "nn.Module", config: Any) -> str:
    path = str(getattr(config, "name_or_path", "")).rstrip("/")
    return path.rpartition("/")[2] or type(getattr(model, "module", model)).__name__


def _shared_experts(layer: MoELayer) -> int | None:
    """Whether the block around a layer's experts has one that every token passes."""
    if layer.block is None:
        return None
    return int(any("shared" in name and "gate" not in name for name, _ in layer.block.named_children()))


def _attention(config: Any) -> Attention:
    """Heads, and the elements that a cache keeps a token: those of the latent vector, where there is one (MLA)."""
    heads, kv_heads = _number(config, *HEADS), _number(config, *KV_HEADS)
    latent = _number(config, "kv_lora_rank")
    if latent is not None:
        return Attention(kv_size=latent + (_number(config, "qk_rope_head_dim") or 0), num_heads=heads)
    hidden, head_dim = _number(config, "hidden_size"), _number(config, "head_dim")
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    kv_size = 2 * kv_heads * head_dim if kv_heads and head_dim else None
    return Attention(kv_size=kv_size, num_heads=heads, num_kv_heads=kv_heads)
