"""The modules of a model that show its routing, and its specification for a trace."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..model import Attention, Latent, ModelSpec

if TYPE_CHECKING:
    from torch import nn

ROUTER_NAMES = ("router", "gate")
EXPERT_ARGUMENTS = 3  # hidden states, expert ids, gate weights
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


@dataclass(frozen=True, slots=True)
class MoELayer:
    """A place where the routing of a layer shows."""

    name: str  #: The module's qualified name
    module: "nn.Module"
    #: The chosen ids are among the arguments of `module` (stacked experts); else they are in what it returns
    at_input: bool = False
    block: "nn.Module | None" = None  #: The module around router and experts, where it is known


def moe_layers(model: "nn.Module", pattern: str | None = None) -> list[MoELayer]:
    """The MoE layers of a model in its own order: by itself, or the routers that a pattern names.

    Raises UsageError where no module has routed experts, or the pattern fits none.

    Notes
    -----
    A block that holds `experts` is an MoE layer. Experts called with (hidden states, ids, weights), as those of every
    family in transformers 5, show what was really used, after group limits, biases and drops; else the block's `router`
    or `gate` must return ids.
    """
    if pattern is not None:
        return [MoELayer(name, module) for name, module in routers(model, pattern)]
    layers = [layer for name, block in model.named_modules() if (layer := _layer_of(name, block)) is not None]
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no MoE layer that is known (a block with `experts` called with expert ids, or"
            " beside a `router` or `gate`); if it has others, give a pattern for the names of its routers (pattern=,"
            f" or --router of the command line){_suggestion(model)}"
        )
    return layers


def routers(model: "nn.Module", pattern: str) -> list[tuple[str, "nn.Module"]]:
    """The modules whose whole qualified name matches a regular expression, in the model's own order.

    Of a model that is wrapped for data parallelism, names may be given as the model inside has them.

    Raises UsageError where the pattern is no regular expression or matches no module.
    """
    around = "module." if [name for name, _ in model.named_children()] == ["module"] else ""
    try:
        matches = [
            (name, module)
            for name, module in model.named_modules()
            if re.fullmatch(pattern, name) or re.fullmatch(pattern, name.removeprefix(around))
        ]
    except re.error as error:
        raise UsageError(
            rf"router pattern {pattern!r} is no regular expression ({error}); expected one such as .*\.mlp\.router"
        ) from error
    if not matches:
        raise UsageError(f"router pattern {pattern!r} matches no module{_suggestion(model)}")
    return matches


def hidden_layers(layers: Sequence[MoELayer]) -> tuple[int, ...]:
    """The hidden layer of each MoE layer: the last number in its name; their ordinals where those do not ascend."""
    numbers = [re.findall(r"(?<![^.])\d+(?![^.])", layer.name) for layer in layers]
    ids = tuple(int(number[-1]) if number else -1 for number in numbers)
    ascending = ids[0] >= 0 and all(a < b for a, b in pairwise(ids))
    return ids if ascending else tuple(range(len(layers)))


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


def _layer_of(name: str, block: "nn.Module") -> MoELayer | None:
    children = dict(block.named_children())
    if (experts := children.get("experts")) is None:
        return None
    if len(inspect.signature(experts.forward).parameters) >= EXPERT_ARGUMENTS:
        return MoELayer(_joined(name, "experts"), experts, at_input=True, block=block)
    router = next((child for child in ROUTER_NAMES if child in children), None)
    return None if router is None else MoELayer(_joined(name, router), children[router], block=block)


def _joined(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _suggestion(model: "nn.Module") -> str:
    some = [name for name, _ in model.named_modules() if re.search("rout|gate", name)][:3]
    return f"; names that may be meant: {', '.join(some) or 'none'}"


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
    """1 where the block around a layer has an expert that every token passes, else 0; None without a block."""
    if layer.block is None:
        return None
    return int(any("shared" in name and "gate" not in name for name, _ in layer.block.named_children()))


def _attention(config: Any) -> Attention:
    """Heads, and the elements that a cache keeps a token: those of the latent vector, where there is one (MLA)."""
    heads, kv_heads = _number(config, *HEADS), _number(config, *KV_HEADS)
    rank, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
    if rank is not None:
        return Attention(kv_size=rank + (rope or 0), num_heads=heads, latent=_latent(config, rank, rope))
    hidden, head_dim = _number(config, "hidden_size"), _number(config, "head_dim")
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    kv_size = 2 * kv_heads * head_dim if kv_heads and head_dim else None
    return Attention(kv_size=kv_size, num_heads=heads, num_kv_heads=kv_heads)


def _latent(config: Any, rank: int, rope: int | None) -> Latent | None:
    """Latent attention; None where the configuration leaves a size of its heads out."""
    head, value = _number(config, "qk_nope_head_dim"), _number(config, "v_head_dim")
    if head is None or rope is None or value is None:
        return None
    q_rank = _number(config, "q_lora_rank")
    return Latent(kv_rank=rank, q_rank=q_rank, head_size=head, rope_size=rope, value_size=value)
