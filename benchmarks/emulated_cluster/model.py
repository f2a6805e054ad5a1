"""A model whose routing is given: a token's vector carries its kind, and a kind's experts are read from a table.

It has the shape of `runtime.models.protocols.LanguageModel`, without norms; attention and experts wait and add nothing,
so that kinds stay legible wherever tokens travel. What it predicts after a token is the next kind but one.

Legend: V kinds; L layers; K experts per token; M hidden size; T tokens.

Waits stand in the place of computation: ranks outnumber cores here, and their real products would wait for one another.
What oversleeps is taken off the next wait, so that waits are exact on average.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from moeplan.planner.replay.model import number_of, signs

LEAST_S = 50e-6  # less is owed until there is more
CARRIED_S = 2e-3  # the most that a wait is shortened by
BACKWARD = 2.0  # times as long as forward
BITS = 16  # of a vector, whose signs tell the kind
STRIDE = 2  # from a kind to the one that follows: odd ones stay odd


class Waiter:
    """The clock of a rank's emulated computation."""

    def __init__(self) -> None:
        self.owed_s = 0.0

    def wait(self, seconds: float) -> None:
        """Pass the time that this takes."""
        self.owed_s += seconds
        if self.owed_s > LEAST_S:
            started = time.perf_counter()
            time.sleep(self.owed_s)
            self.owed_s = max(self.owed_s - (time.perf_counter() - started), -CARRIED_S)


class WaitingExperts(nn.Module):
    """Experts that take `start_s + pair_s` a token-expert pair, forward, twice that backward, and add nothing."""

    def __init__(self, num_experts: int, waiter: Waiter, start_s: float, pair_s: float, size: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, size, 1))
        self.waiter, self.start_s, self.pair_s = waiter, start_s, pair_s

    def forward(self, x_TM: Tensor, ids_TK: Tensor, _weight_TK: Tensor) -> Tensor:
        """Zeros `[T, M]`, some time later."""
        seconds = self.start_s + self.pair_s * ids_TK.numel()
        y_TM: Tensor = _Waited.apply(x_TM, self.waiter, seconds)  # type: ignore[no-untyped-call]
        return y_TM


class _Waited(torch.autograd.Function):
    """Zeros after a wait; backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, waiter: Waiter, seconds: float) -> Tensor:
        ctx.waiter, ctx.seconds = waiter, seconds
        waiter.wait(seconds)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.waiter.wait(BACKWARD * ctx.seconds)
        return torch.zeros_like(grads[0]), None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model and what its computation takes.

    Parameters
    ----------
    kv_size
        Elements of K and V together, a token and layer.
    expert_size
        Parameters of an expert.
    element_bytes
        Of the hidden vectors.
    start_s, pair_s, attention_s
        Of a call of the experts, of each of its token-expert pairs, and of attention, a token.
    """

    num_experts: int
    hidden_size: int = 1024
    kv_size: int = 512
    expert_size: int = 1
    element_bytes: int = 4
    start_s: float = 2e-4
    pair_s: float = 1e-4
    attention_s: float = 1e-4


class EmulatedModel(nn.Module):
    """A model that routes a token of kind v in layer l to experts `ids_VLK[v, l]`."""

    def __init__(self, ids_VLK: np.ndarray, sizes: Sizes) -> None:
        super().__init__()
        waiter = Waiter()
        self.embed = _Embedding(len(ids_VLK), sizes.hidden_size)
        self.layers = nn.ModuleList(_Layer(table, sizes, waiter) for table in torch.as_tensor(ids_VLK).unbind(1))
        self.norm = nn.Identity()
        self.head = _Head(len(ids_VLK))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits `[B, S, V]`."""
        x = self.embed(tokens_BS)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Embedding(nn.Module):
    """Vectors whose first elements spell the kind in signs."""

    def __init__(self, num_kinds: int, hidden_size: int) -> None:
        super().__init__()
        spelt = signs(torch.arange(num_kinds), BITS).float()
        self.register_buffer("table", functional.pad(spelt, (0, hidden_size - BITS)))
        self.table: Tensor
        self.shift = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens] + self.shift


class _Router(nn.Module):
    def __init__(self, ids_VK: Tensor) -> None:
        super().__init__()
        self.top_k = ids_VK.shape[1]
        self.register_buffer("ids", ids_VK.long())
        self.ids: Tensor
        self.register_buffer("weight", torch.arange(self.top_k, 0, -1.0).softmax(0).expand(len(ids_VK), -1))
        self.weight: Tensor

    def forward(self, x_TM: Tensor) -> tuple[Tensor, Tensor]:
        kind_T = kind_of(x_TM)
        return self.weight[kind_T], self.ids[kind_T]


class _Attention(nn.Module):
    """Attention that takes time and adds nothing; its keys and values are of the right size."""

    window = None
    dropout = 0.0

    def __init__(self, sizes: Sizes, waiter: Waiter) -> None:
        super().__init__()
        self.sizes, self.waiter = sizes, waiter

    def project(self, x: Tensor, _position_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key = x.new_zeros(*x.shape[:-1], 1, self.sizes.kv_size // 2)
        return key[..., :1], key, key

    def attend(self, q: Tensor, _k: Tensor, _v: Tensor, _mask: Tensor | None) -> Tensor:
        self.waiter.wait(self.sizes.attention_s * q.shape[:-2].numel())
        return q.new_zeros(*q.shape[:-2], self.sizes.hidden_size)


class _Block(nn.Module):
    def __init__(self, ids_VK: Tensor, sizes: Sizes, waiter: Waiter) -> None:
        super().__init__()
        self.router = _Router(ids_VK)
        self.experts = WaitingExperts(sizes.num_experts, waiter, sizes.start_s, sizes.pair_s, sizes.expert_size)

    def forward(self, x: Tensor) -> Tensor:
        x_TM = x.flatten(0, -2)
        weight_TK, ids_TK = self.router(x_TM)
        y: Tensor = self.experts(x_TM, ids_TK, weight_TK)
        return y.view_as(x)


class _Layer(nn.Module):
    def __init__(self, ids_VK: Tensor, sizes: Sizes, waiter: Waiter) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.Identity(), nn.Identity()
        self.attention, self.moe = _Attention(sizes, waiter), _Block(ids_VK, sizes, waiter)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention.project(x, torch.zeros(0))
        x = x + self.attention.attend(q, k, v, None)
        y: Tensor = x + self.moe(self.moe_norm(x))
        return y


class _Head(nn.Module):
    """Logits that are 1 at the kind that follows."""

    def __init__(self, num_kinds: int) -> None:
        super().__init__()
        self.num_kinds = num_kinds

    def forward(self, x: Tensor) -> Tensor:
        after = functional.one_hot((kind_of(x) + STRIDE) % self.num_kinds, self.num_kinds)
        return after + 0 * x[..., :1]


def train(model: nn.Module, *inputs: Tensor) -> None:
    """Forward and backward."""
    model(*inputs).sum().backward()


def kind_of(x: Tensor) -> Tensor:
    """The kind that a vector spells, int64."""
    return number_of(x, BITS)
