"""The embedded Mixture-of-Experts language model: byte level, pre-norm, grouped-query attention, top-k routed experts.

Its parts work on flat lists of tokens, none included, so that a rank may hold tokens of several samples, some of the
experts, and keys and values that other ranks made. The modules that route are named `layers.{i}.moe.router`.

Legend: B samples; S positions; T tokens; L layers; M hidden size; H expert FFN size; E experts; K experts per token;
V vocabulary; A query heads; G key-value heads; C elements of a head.
"""

import json
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...profilers.attended import rotated
from ...profilers.routed import weighted_experts
from ...traces.model import Attention as AttentionSpec
from ...traces.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of the embedded model."""

    vocab_size: int = 256
    num_layers: int = 6
    num_experts: int = 16
    top_k: int = 2
    hidden_size: int = 128
    ffn_size: int = 64
    num_heads: int = 8
    num_kv_heads: int = 1
    max_positions: int = 256

    @property
    def head_dim(self) -> int:
        """Elements of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_size(self) -> int:
        """Elements of K and V together, a token and layer."""
        return 2 * self.num_kv_heads * self.head_dim

    def spec(self, dtype_bytes: int = 4) -> ModelSpec:
        """Specification of this model, as traces and plans store it."""
        return ModelSpec(
            name="moeplan-demo",
            layer_ids=tuple(range(self.num_layers)),
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_hidden_layers=self.num_layers,
            num_mtp_layers=0,
            num_shared_experts=0,
            hidden_size=self.hidden_size,
            ffn_size=self.ffn_size,
            dtype_bytes=dtype_bytes,
            attention=AttentionSpec(kv_size=self.kv_size, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads),
        )


class Router(nn.Module):
    """The gate of a layer: the top-k experts of each token, largest weight first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.balance_loss: Tensor | None = None  #: Of the last pass, a scalar; None outside training

    def forward(self, x_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Weights `[T, K]`, descending, summing to 1, and expert ids int64 `[T, K]`."""
        logits_TE: Tensor = self.gate(x_TM)
        top_TK, ids_TK = logits_TE.topk(self.top_k, dim=-1)
        self.balance_loss = _balance_loss(logits_TE, ids_TK) if self.training else None
        return top_TK.softmax(dim=-1), ids_TK


class Experts(nn.Module):
    """The feed-forward experts of a layer: `w_in` `[E, H, M]` and `w_out` `[E, M, H]`, of which a rank slices E."""

    def __init__(self, num_experts: int, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(num_experts, ffn_size, hidden_size) * hidden_size**-0.5)
        self.w_out = nn.Parameter(torch.randn(num_experts, hidden_size, ffn_size) * ffn_size**-0.5)

    def forward(self, x_TM: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts, `[T, M]`."""
        return weighted_experts(x_TM, ids_TK, weights_TK, self.w_in, self.w_out)


class MoEBlock(nn.Module):
    """A routed feed-forward block: the weighted sum of each token's top-k experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config.num_experts, config.hidden_size, config.ffn_size)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., M]` to `[..., M]`."""
        x_TM = x.flatten(0, -2)
        weights_TK, ids_TK = self.router(x_TM)
        y_TM: Tensor = self.experts(x_TM, ids_TK, weights_TK)
        return y_TM.view_as(x)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, in two halves: `project`, then `attend`."""

    window: int | None = None
    dropout: float = 0.0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_heads * config.head_dim
        self.query = nn.Linear(config.hidden_size, width, bias=False)
        self.key_value = nn.Linear(config.hidden_size, config.kv_size, bias=False)
        self.output = nn.Linear(width, config.hidden_size, bias=False)

    def project(self, x: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[..., T, A, C]`, keys and values `[..., T, G, C]` of tokens `[..., T, M]` at these positions."""
        config, tokens = self.config, x.shape[:-1]
        q: Tensor = self.query(x).view(*tokens, config.num_heads, config.head_dim)
        k, v = self.key_value(x).view(*tokens, 2 * config.num_kv_heads, config.head_dim).chunk(2, dim=-2)
        return rotated(q, position_T), rotated(k, position_T), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """The attended values after the output projection, `[..., Tq, M]`, of what `project` gives.

        Parameters
        ----------
        mask
            bool `[Tq, Tk]` or `[..., Tq, Tk]`, true where a query sees a key; every query must see one.
        """
        groups = self.config.num_kv_heads, self.config.num_heads // self.config.num_kv_heads
        if alone := q.shape[-3] == 1:  # the heads of a group go as its queries, and keys and values need no copies
            q = q.reshape(*q.shape[:-3], *groups, q.shape[-1]).transpose(-3, -2)
        else:
            k, v = (heads.repeat_interleave(groups[1], dim=-2) for heads in (k, v))
        q, k, v = (heads.transpose(-3, -2) for heads in (q, k, v))
        every_head = mask if mask.ndim == 2 else mask.unsqueeze(-3)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=every_head)
        y = y.flatten(-3, -2).unsqueeze(-3) if alone else y.transpose(-3, -2)
        output: Tensor = self.output(y.flatten(-2))
        return output


class Layer(nn.Module):
    """A transformer layer: attention, then routed experts, each after a norm and added to the residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.moe = MoEBlock(config)

    def forward(self, x_BSM: Tensor, position_S: Tensor, mask_SS: Tensor) -> Tensor:
        """`[B, S, M]` to `[B, S, M]`."""
        q, k, v = self.attention.project(self.attention_norm(x_BSM), position_S)
        x_BSM = x_BSM + self.attention.attend(q, k, v, mask_SS)
        y_BSM: Tensor = x_BSM + self.moe(self.moe_norm(x_BSM))
        return y_BSM


class MoELanguageModel(nn.Module):
    """The whole model, from bytes to the logits of the next byte."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def routers(self) -> list[Router]:
        """The router of each layer."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits `[B, S, V]` of samples at positions 0 to S - 1, each token seeing those before it and itself."""
        position_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        mask_SS = position_S[:, None] >= position_S
        x_BSM = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSM = layer(x_BSM, position_S, mask_SS)
        logits_BSV: Tensor = self.head(self.norm(x_BSM))
        return logits_BSV


def load_embedded() -> MoELanguageModel:
    """The trained model that ships with moeplan, float32, in eval mode."""
    from safetensors.torch import load

    folder = files(__package__)
    record = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    model = MoELanguageModel(ModelConfig(**record["config"]))
    model.load_state_dict(load((folder / "model.safetensors").read_bytes()))
    return model.eval()


def _balance_loss(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """The loss of Switch Transformers (Eq. 4): E times the sum of share chosen x mean probability; 1 when even."""
    num_experts = logits_TE.shape[1]
    share_E = ids_TK.flatten().bincount(minlength=num_experts) / ids_TK.numel()
    return num_experts * (share_E * logits_TE.softmax(dim=-1).mean(0)).sum()
