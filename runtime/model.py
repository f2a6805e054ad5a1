"""The shape of a model that `parallelize` takes, as protocols: attention in two halves, then routed experts.

Legend: B samples; S positions; T tokens; K experts a token; E experts; M hidden size; H expert FFN size; V vocabulary.
Everything must also take zero tokens: a rank may hold none.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

__all__ = ["Attention", "Experts", "LanguageModel", "Layer", "MoE", "Router"]


class Router(Protocol):
    """The gate of a layer: which experts, and how much of each."""

    top_k: int

    def __call__(self, x_TM: Tensor, /) -> tuple[Tensor, Tensor]:
        """Gate weights `[T, K]`, descending, and expert ids int64 `[T, K]`."""
        ...


class Experts(Protocol):
    """The experts of a layer; the first dimension of every parameter is E."""

    w_in: Parameter  # [E, H, M]

    def __call__(self, x_TM: Tensor, expert: int, /) -> Tensor:
        """One expert's output, `[T, M]`."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The stacked weights of all experts, none in a submodule."""
        ...


class MoE(Protocol):
    """The weighted sum of each token's top-k experts, `[..., M]` to `[..., M]`."""

    router: Router
    experts: Experts


class Attention(Protocol):
    """Attention as `project`, which needs a token alone, and `attend`, which needs its context."""

    def project(self, x_TM: Tensor, position_T: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[T, heads, d]`, keys and values `[T, kv heads, d]`."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, /) -> Tensor:
        """`[Tq, M]`; `mask` bool `[Tq, Tk]` is true where a query sees a key."""
        ...


class Layer(Protocol):
    """`x + attention(attention_norm(x))`, then `x + moe(moe_norm(x))`."""

    attention_norm: Callable[[Tensor], Tensor]
    attention: Attention
    moe_norm: Callable[[Tensor], Tensor]
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
