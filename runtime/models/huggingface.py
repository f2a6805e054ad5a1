"""The view of a transformers model as `runtime.models.protocols.LanguageModel`: Mixtral, Qwen3-MoE, OLMoE and gpt-oss.

It holds no weights: every call goes to the model's own modules, whatever has replaced their experts by then.

Legend: T tokens; M hidden size; A query heads; G key-value heads; C elements of a head; K experts per token; B samples;
S positions; V vocabulary.
"""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...errors import UsageError
from .protocols import Attention, LanguageModel, Layer

FAMILIES = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "GptOssForCausalLM")
SHAPE = ("embed", "layers", "norm", "head")
LENGTH_BOUND = ("dynamic", "longrope")  # rotary frequencies that follow the longest sample of a batch


def view(model: nn.Module) -> LanguageModel:
    """The runtime's view of a model: itself where it has the shape already, else its parts under those names.

    Raises
    ------
    UsageError
        The model is of another family, or its rotary positions depend on the batch.
    """
    if all(hasattr(model, name) for name in SHAPE):
        return cast("LanguageModel", model)
    for cls in type(model).__mro__:  # FSDP and users subclass
        if cls.__name__ in FAMILIES and cls.__module__.startswith("transformers."):
            return _View(model, sys.modules[cls.__module__])
    raise UsageError(
        f"a model of class {type(model).__name__}; this dispatch model takes {', '.join(FAMILIES)}, or a model with"
        f" {', '.join(SHAPE)}; apply the plan with standard dispatch"
    )


class _View:
    """A causal language model; `family` is the Python module that defines its class."""

    def __init__(self, model: Any, family: ModuleType) -> None:
        rope_type = model.config.rope_parameters["rope_type"]
        if rope_type in LENGTH_BOUND:
            raise UsageError(
                f"rotary positions of type {rope_type!r} depend on the longest sample of a batch; this dispatch model"
                " takes types that do not; apply the plan with standard dispatch"
            )
        self.model = model
        self.embed, self.norm, self.head = model.model.embed_tokens, model.model.norm, model.lm_head
        self.layers: list[Layer] = [_Layer(layer, model.model.rotary_emb, family) for layer in model.model.layers]

    def __call__(self, tokens_BS: Tensor) -> Tensor:
        logits_BSV: Tensor = self.model(tokens_BS, use_cache=False).logits
        return logits_BSV


class _Layer:
    """A decoder layer."""

    def __init__(self, layer: Any, rotary: Any, family: ModuleType) -> None:
        self.attention_norm, self.moe_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.attention: Attention = _Attention(layer.self_attn, rotary, family, _window(layer.self_attn, family))
        self.moe: Any = _Block(layer.mlp)


@dataclass(slots=True, eq=False)
class _Block:
    """A feed-forward block, called with a flat list of tokens; a dense one has no `experts`."""

    block: Any

    @property
    def experts(self) -> Any:
        """The module that the block calls now: its own experts, or those that took their place."""
        return self.block.experts

    def router(self, x_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Gate weights `[T, K]` and expert ids int64 `[T, K]`."""
        router = self.block.router if hasattr(self.block, "router") else self.block.gate
        weights_TK, ids_TK = router(x_TM)[-2:]
        return weights_TK, ids_TK

    def __call__(self, x_TM: Tensor) -> Tensor:
        result = self.block(x_TM[None])
        y_1TM: Tensor = result[0] if isinstance(result, tuple) else result  # gpt-oss: with its scores
        return y_1TM[0]


@dataclass(slots=True, eq=False)
class _Attention:
    """An attention module in two halves: what its forward does before and after its cache."""

    module: Any
    rotary: Any
    family: ModuleType
    window: int | None

    @property
    def dropout(self) -> float:
        """The share of attention weights that `attend` drops now; 0 outside training."""
        return float(self.module.config.attention_dropout) if self.module.training else 0.0

    def project(self, x_TM: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[T, A, C]`, keys and values `[T, G, C]`.

        Raises
        ------
        UsageError
            In training, where the router jitters, which its block does and is not asked to.
        """
        if self.module.training and (jitter := getattr(self.module.config, "router_jitter_noise", 0.0)):
            raise UsageError(
                f"router_jitter_noise {jitter} in training; this dispatch model leaves it out: set it to 0"
            )
        q, k, v = (self._heads(x_TM, name) for name in "qkv")
        cos, sin = self.rotary(x_TM[None], position_ids=position_T[None])
        q, k = self.family.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
        return q[0].transpose(0, 1), k[0].transpose(0, 1), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """The attended values after the output projection, `[..., Tq, M]`, by the model's own arithmetic."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if q.ndim == 3:
            y_TM: Tensor = self.attend(q[None], k[None], v[None], mask)[0]
            return y_TM
        module = self.module
        fused = module.config._attn_implementation == "sdpa" and q.numel() > 0  # others take no mask of ours
        interface = ALL_ATTENTION_FUNCTIONS["sdpa"] if fused else self.family.eager_attention_forward
        added = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
        heads = (states.transpose(1, 2) for states in (q, k, v))
        every_head = added[:, None] if mask.ndim == 3 else added[None, None]
        y_bTAC, _ = interface(module, *heads, every_head, dropout=self.dropout, scaling=module.scaling)
        y_bTM: Tensor = module.o_proj(y_bTAC.flatten(2))
        return y_bTM

    def _heads(self, x_TM: Tensor, name: str) -> Tensor:
        """The queries, keys or values `[T, heads, C]` before their rotation."""
        module, width = self.module, self.module.head_dim
        states = getattr(module, f"{name}_proj")(x_TM)
        norm = getattr(module, f"{name}_norm", None)
        if norm is not None:
            by_head = norm.weight.shape[0] == width  # Qwen3-MoE; OLMoE norms the whole width
            states = norm(states.unflatten(-1, (-1, width)) if by_head else states).flatten(1)
        if (most := getattr(module.config, "clip_qkv", None)) is not None:
            states = states.clamp(-most, most)
        heads: Tensor = states.unflatten(-1, (-1, width))
        return heads


def _window(attention: Any, family: ModuleType) -> int | None:
    """The number of last keys that a query of this layer sees; None: all."""
    if not hasattr(family, "create_sliding_window_causal_mask"):
        return None
    shared = getattr(attention.config, "sliding_window", None)
    window: int | None = getattr(attention, "sliding_window", shared)  # gpt-oss: of this layer
    return window
