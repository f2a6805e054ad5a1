"""The MoE layers of a model alone, whose tokens go to the experts that a trace recorded.

A token's vector spells its number in signs, from which routers read its experts wherever it is; experts and attention
leave these elements as they are. Attention takes no time and adds nothing, its keys and values are of the right size.

Legend: N tokens of all steps; T tokens here; L MoE layers; E experts, K per token; H their inner size; M hidden size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...profilers.routed import weighted_experts
from ...traces.model import ModelSpec

DEVIATION = 0.02  # of weights
PATTERNS = 1024  # of hidden vectors, which tokens take in turn


class States(NamedTuple):
    """Recorded gate weights, and hidden states that stand for those of some tokens before the experts of each layer."""

    weights: Tensor  #: float32 `[N, L, K]`
    row: Tensor  #: Of each of these tokens among the hidden states, int64 `[N]`
    layers: Sequence[Tensor]  #: Hidden states by layer, `[rows, M]`


class LayersAlone(nn.Module):
    """MoE layers that send tokens int64 `[B, S]`, numbers below N, to experts `ids_NLK`; a `LanguageModel`.

    Weights are zeros of `dtype` until `fill`. On a CPU they take no memory before, when each rank has its own alone.
    Without `states` gates are equal, and experts take the residual stream; tokens that return take them where given.
    """

    def __init__(
        self, spec: ModelSpec, ids_NLK: Tensor, dtype: torch.dtype = torch.float32, states: States | None = None
    ) -> None:
        super().__init__()
        assert spec.hidden_size is not None
        self.bits = bits_for(len(ids_NLK))
        self.embed = _Embedding(self.bits, spec.hidden_size).to(dtype)
        self.layers = nn.ModuleList(
            _Layer(spec, ids_NK, self.bits, dtype, _of_layer(states, layer, dtype))
            for layer, ids_NK in enumerate(ids_NLK.unbind(1))
        )
        self.norm, self.head = nn.Identity(), _First()

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """The first element of every token's vector after all layers, `[B, S, 1]`."""
        x = self.embed(tokens_BS)
        for layer in self.layers:
            x = x + layer.get_submodule("moe")(x)
        y: Tensor = self.head(x)
        return y

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Draw the weights of the experts that are here."""
        rng = torch.Generator(self.embed.shift.device).manual_seed(seed)
        for name, weight in self.named_parameters():
            if "experts" in name:
                weight.normal_(0, DEVIATION, generator=rng)
                if name.endswith("w_out"):
                    weight[:, : self.bits] = 0


def bits_for(count: int) -> int:
    """Elements of a vector that spell a number below `count`."""
    return max(count - 1, 1).bit_length()


def signs(number: Tensor, bits: int) -> Tensor:
    """Numbers `[...]` spelt in signs, int64 `[..., bits]`."""
    return ((number[..., None] >> torch.arange(bits, device=number.device)) & 1) * 2 - 1


def number_of(x: Tensor, bits: int) -> Tensor:
    """The number that the first elements of a vector spell, int64."""
    return ((x[..., :bits] > 0).long() << torch.arange(bits, device=x.device)).sum(-1)


class _OfLayer(NamedTuple):
    """States of one layer: weights `[N, K]`, row `[N]`, and its hidden states `[rows, M]`."""

    weights: Tensor
    row: Tensor
    x: Tensor


def _of_layer(states: States | None, layer: int, dtype: torch.dtype) -> _OfLayer | None:
    if states is None:
        return None
    return _OfLayer(states.weights[:, layer], states.row, states.layers[layer].to(dtype))


class _Embedding(nn.Module):
    """Vectors whose first elements spell the token's number."""

    def __init__(self, bits: int, hidden_size: int) -> None:
        super().__init__()
        self.bits = bits
        self.shift = nn.Parameter(torch.zeros(hidden_size))  # for which gradients are computed
        rows = torch.randn(PATTERNS, hidden_size - bits, generator=torch.Generator().manual_seed(0))
        self.register_buffer("rows", rows, persistent=False)
        self.rows: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        spelt = signs(tokens, self.bits).to(self.rows.dtype)
        return torch.cat([spelt, self.rows[tokens % PATTERNS]], dim=-1) + self.shift


class _Router(nn.Module):
    """A gate that sends tokens where they were recorded to go, by recorded weights or in equal parts."""

    def __init__(self, top_k: int, ids_NK: Tensor, bits: int, weights_NK: Tensor | None) -> None:
        super().__init__()
        self.top_k, self.bits = top_k, bits
        self.register_buffer("ids", ids_NK, persistent=False)
        self.register_buffer("weights", weights_NK, persistent=False)
        self.ids: Tensor
        self.weights: Tensor | None

    def forward(self, x_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Gate weights and experts that were recorded for these tokens, `[T, K]` each."""
        number_T = number_of(x_TM, self.bits)
        ids_TK = self.ids[number_T].long()
        if self.weights is not None:
            return self.weights[number_T], ids_TK
        return x_TM.new_full(ids_TK.shape, 1 / self.top_k, dtype=torch.float32), ids_TK


class _Experts(nn.Module):
    """Experts with gate, up and down projections."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        assert spec.hidden_size is not None
        assert spec.ffn_size is not None
        self.w_in = nn.Parameter(torch.zeros(spec.num_experts, 2 * spec.ffn_size, spec.hidden_size, dtype=dtype))
        self.w_out = nn.Parameter(torch.zeros(spec.num_experts, spec.hidden_size, spec.ffn_size, dtype=dtype))

    def forward(self, x_TM: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sums of the experts of tokens, `[T, M]`."""
        return weighted_experts(x_TM, ids_TK, weights_TK.to(x_TM.dtype), self.w_in, self.w_out)


class _Block(nn.Module):
    """A routed block, whose experts take recorded hidden states where there are some."""

    def __init__(self, spec: ModelSpec, ids_NK: Tensor, bits: int, dtype: torch.dtype, states: _OfLayer | None) -> None:
        super().__init__()
        self.router = _Router(spec.top_k, ids_NK, bits, None if states is None else states.weights)
        self.experts = _Experts(spec, dtype)
        for name in ("row", "x"):
            self.register_buffer(name, None if states is None else getattr(states, name), persistent=False)
        self.row: Tensor
        self.x: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Results of the routed experts, of the shape of the hidden vectors."""
        x_TM = x.flatten(0, -2)
        weights_TK, ids_TK = self.router(x_TM)
        if self.x is not None:
            x_TM = self.x[self.row[number_of(x_TM, self.router.bits)]] + 0 * x_TM[:, :1]  # gradients go back, too
        y_TM: Tensor = self.experts(x_TM, ids_TK, weights_TK)
        return y_TM.view_as(x)


class _Attention(nn.Module):
    """Attention that computes nothing."""

    window = None
    dropout = 0.0

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.kv_size, self.hidden_size = spec.attention.kv_size or 2, spec.hidden_size or 0

    def project(self, x: Tensor, _position_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key = x.new_zeros(*x.shape[:-1], 1, self.kv_size // 2)
        return key[..., :1], key, key

    def attend(self, q: Tensor, _k: Tensor, _v: Tensor, _mask: Tensor | None) -> Tensor:
        return q.new_zeros(*q.shape[:-2], self.hidden_size)


class _Layer(nn.Module):
    def __init__(self, spec: ModelSpec, ids_NK: Tensor, bits: int, dtype: torch.dtype, states: _OfLayer | None) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.Identity(), nn.Identity()
        self.attention, self.moe = _Attention(spec), _Block(spec, ids_NK, bits, dtype, states)


class _First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., :1]
