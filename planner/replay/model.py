"""The MoE layers of a model alone, whose tokens go to the experts that a trace recorded.

A token's vector spells its number in signs, from which routers read its experts wherever it is; experts and attention
leave these elements as they are. Attention takes no time and adds nothing, its keys and values are of the right size.

Legend: N tokens of a step; T tokens here; L MoE layers; E experts, K per token; H their inner size; M hidden size.
"""

import torch
from torch import Tensor, nn

from ...profilers.routed import weighted_experts
from ...traces.model import ModelSpec

DEVIATION = 0.02  # of weights
PATTERNS = 1024  # of hidden vectors, which tokens take in turn


class LayersAlone(nn.Module):
    """MoE layers that send tokens int64 `[B, S]`, numbers below N, to experts `ids_NLK`; a `LanguageModel`.

    Weights are zeros of `dtype` until `fill`. On a CPU they take no memory before, when each rank has its own alone.
    """

    def __init__(self, spec: ModelSpec, ids_NLK: Tensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        assert spec.hidden_size is not None
        self.bits = max(len(ids_NLK) - 1, 1).bit_length()
        self.embed = _Embedding(self.bits, spec.hidden_size).to(dtype)
        self.layers = nn.ModuleList(_Layer(spec, ids_NK, self.bits, dtype) for ids_NK in ids_NLK.unbind(1))
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
        spelt = ((tokens[..., None] >> torch.arange(self.bits, device=tokens.device)) & 1) * 2 - 1
        return torch.cat([spelt.to(self.rows.dtype), self.rows[tokens % PATTERNS]], dim=-1) + self.shift


class _Router(nn.Module):
    """A gate that sends tokens where they were recorded to go, in equal parts."""

    def __init__(self, ids_NK: Tensor, bits: int) -> None:
        super().__init__()
        self.top_k = ids_NK.shape[1]
        self.register_buffer("ids", ids_NK, persistent=False)
        self.register_buffer("place", 1 << torch.arange(bits), persistent=False)
        self.ids: Tensor
        self.place: Tensor

    def forward(self, x_TM: Tensor) -> tuple[Tensor, Tensor]:
        number_T = ((x_TM[:, : len(self.place)] > 0) * self.place).sum(1)
        ids_TK = self.ids[number_T].long()
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
        return weighted_experts(x_TM, ids_TK, weights_TK.to(x_TM.dtype), self.w_in, self.w_out)


class _Block(nn.Module):
    def __init__(self, spec: ModelSpec, ids_NK: Tensor, bits: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.router, self.experts = _Router(ids_NK, bits), _Experts(spec, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x_TM = x.flatten(0, -2)
        weights_TK, ids_TK = self.router(x_TM)
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
    def __init__(self, spec: ModelSpec, ids_NK: Tensor, bits: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.Identity(), nn.Identity()
        self.attention, self.moe = _Attention(spec), _Block(spec, ids_NK, bits, dtype)


class _First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., :1]
