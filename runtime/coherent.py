"""The context-coherent forward (ExFlow): a token lives where its highest-weight expert is, and attention comes to it.

Legend: B samples of this rank; S positions; G tokens of all ranks, numbered by rank, then
sample, then position; T tokens that this rank holds, their numbers ascending; K experts a token; M hidden size;
C samples of which the rank holds tokens; n rows; V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .contexts import Contexts
from .exchange import Splits
from .layer import ParallelExperts
from .model import Attention, LanguageModel, Layer
from .traffic import Traffic

__all__ = ["coherent_forward"]

QUERY_CHUNK = 1024  # queries that attend at once: bounds a mask to this many rows of one sample's keys


@dataclass(frozen=True, slots=True)
class Held:
    """The tokens that a rank holds: their hidden vectors `[T, M]` and their numbers, int64 `[T]`, ascending."""

    x: Tensor
    token: Tensor


@torch.no_grad()
def coherent_forward(
    model: LanguageModel, tokens_BS: Tensor, sample_B: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Traffic]:
    """Logits `[B, S, V]` of this rank's samples, and what crossed devices; all ranks call it together.

    Parameters
    ----------
    model
        Its `layers[i].moe.experts` are `ParallelExperts`.
    sample_B
        Global sample ids, int64.
    """
    contexts = Contexts.gather(sample_B, torch.full_like(sample_B, tokens_BS.shape[1]), group)
    held = Held(model.embed(tokens_BS).flatten(0, 1), contexts.own())
    traffic = Traffic()
    for layer in model.layers:
        attended, gathered = _attend(layer, held, contexts)
        held, moved = _migrate(layer, attended, contexts)
        traffic = traffic + gathered + moved
    x_TM, returned = _return(held, contexts)
    logits_TV = model.head(model.norm(x_TM))
    return logits_TV.view(*tokens_BS.shape, logits_TV.shape[1]), traffic + returned


def _attend(layer: Layer, held: Held, contexts: Contexts) -> tuple[Held, Traffic]:
    """The held tokens after attention, for which every rank gathers the keys and values of all tokens."""
    q, k, v = layer.attention.project(layer.attention_norm(held.x), contexts.position[held.token])
    kv_T2 = torch.stack([k, v], dim=1)
    splits = Splits.to_all(kv_T2, contexts.group)
    arrived, number_G = splits.exchange_all(kv_T2), splits.exchange_all(held.token.int())
    kv_G2 = torch.empty_like(arrived)
    kv_G2[number_G.long()] = arrived
    x_TM = held.x + _attention(layer.attention, q, kv_G2, held, contexts)
    received = splits.reversed().crossing_bytes(kv_T2)
    return Held(x_TM, held.token), Traffic(kv_bytes=received, ids_bytes=splits.crossing_bytes(number_G))


def _attention(attention: Attention, q: Tensor, kv_G2: Tensor, held: Held, contexts: Contexts) -> Tensor:
    """What attention adds to each held token, `[T, M]`: one sample at a time, each query seeing keys up to itself."""
    position_T, y_TM = contexts.position[held.token], torch.zeros_like(held.x)
    context_C, count_C = torch.unique_consecutive(contexts.context[held.token], return_counts=True)
    rows_C = torch.split(torch.arange(len(q), device=q.device), count_C.tolist())
    for context, rows in zip(context_C.tolist(), rows_C, strict=True):
        k, v = kv_G2[contexts.first[context] : contexts.first[context + 1]].unbind(1)
        position_S = torch.arange(len(k), device=k.device)
        for chunk in torch.split(rows, QUERY_CHUNK):
            y_TM[chunk] = attention.attend(q[chunk], k, v, position_T[chunk, None] >= position_S)
    return y_TM


def _migrate(layer: Layer, held: Held, contexts: Contexts) -> tuple[Held, Traffic]:
    """The tokens that live here after the block: each moves to the device of its first expert."""
    x_TM, experts = layer.moe_norm(held.x), getattr(layer.moe, "experts", None)
    if not isinstance(experts, ParallelExperts):
        return Held(held.x + layer.moe(x_TM), held.token), Traffic()
    weight_TK, ids_TK = layer.moe.router(x_TM)
    experts.begin(contexts.sample[held.token], contexts.position[held.token])
    y_nM, token_n = experts.carry(
        held.x,
        ids_TK,
        weight_TK,
        experts.devices(ids_TK),
        held.token,
        layer.moe_norm,
        lambda first, _token: first.long(),
        stays=ids_TK.shape[1] == 1,
    )
    token, row_n = token_n.unique(return_inverse=True)
    return Held(y_nM.new_zeros(len(token), y_nM.shape[1]).index_add(0, row_n, y_nM), token), experts.traffic


def _return(held: Held, contexts: Contexts) -> tuple[Tensor, Traffic]:
    """The hidden vectors of the tokens that started here, in their order, `[B * S, M]`."""
    source_T = contexts.source[held.token]  # ascends with the number
    splits = Splits.agree(source_T.bincount(minlength=dist.get_world_size(contexts.group)), contexts.group)
    home = _ascending(splits.exchange(held.x), splits.exchange(held.token.int()))
    return home.x, Traffic(return_bytes=splits.crossing_bytes(home.x, home.token.int()))


def _ascending(x: Tensor, token: Tensor) -> Held:
    order = token.argsort()
    return Held(x[order], token[order].long())
