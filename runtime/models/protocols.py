"""The shape of a model that `parallelize` takes, as protocols: attention in two halves, then routed experts.

Legend: B samples; S positions; T tokens; E experts, K per token; M hidden size; H expert FFN size; V vocabulary.
Everything must also take zero tokens: a rank may hold none.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn import Module

from ...profilers import attended


class Router(Protocol):
    """The gate of a layer: which experts, and how much of each."""

    top_k: int

    def __call__(self, x_TM: Tensor, /) -> tuple[Tensor, Tensor]:
        """Gate weights `[T, K]`, descending, and expert ids int64 `[T, K]`."""
        ...


class MoE(Protocol):
    """The weighted sum of each token's top-k experts, `[..., M]` to `[..., M]`; a dense block has neither part."""

    router: Router
    experts: Module  # called as experts(x_TM, ids_TK, weights_TK); the first dimension of every parameter is E

    def __call__(self, x: Tensor, /) -> Tensor:
        """The whole block."""
        ...


class Attention(attended.Attention, Protocol):
    """Attention of a model, which may draw what it drops."""

    @property
    def dropout(self) -> float:
        """The share that `attend` drops now, drawn from torch's default generator; 0: nothing is drawn."""
        ...


class Layer(Protocol):
    """`x + attention(attention_norm(x))`, then `x + moe(moe_norm(x))`."""

    attention_norm: Module
    attention: Attention
    moe_norm: Module
    moe: MoE


class LanguageModel(Protocol):
    """`head(norm(layers(embed(tokens))))`."""

    embed: Callable[[Tensor], Tensor]
    layers: list[Layer]
    norm: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]

    def __call__(self, tokens_BS: Tensor, /) -> Tensor:
        """Logits `[B, S, V]` of tokens int64 `[B, S]`."""
        ...
