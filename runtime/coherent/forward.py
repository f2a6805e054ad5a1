"""Context-coherent dispatch (ExFlow): a token lives where its highest-weight expert is, and attention comes to it.

Legend: B samples of this rank; S positions; G tokens of all ranks, numbered by rank, then sample, then position;
T tokens that this rank holds, their numbers ascending; K experts a token; M hidden size; n rows; V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.gather import Count, Gather
from ..engine.layer import ParallelExperts
from ..engine.payload import Columns
from ..engine.route import Route
from ..engine.traffic import Traffic
from ..models.protocols import LanguageModel, Layer
from .context_attention import attend_contexts
from .contexts import Contexts
from .held import Held

__all__ = ["Coherent", "CoherentLogits", "coherent_forward"]


@dataclass(frozen=True, slots=True, eq=False)
class CoherentLogits:
    """A coherent forward's logits `[B, S, V]`, what crossed devices, and the most bytes of K and V held at once."""

    logits: Tensor
    traffic: Traffic
    cache_bytes: int


@torch.no_grad()
def coherent_forward(
    model: LanguageModel,
    tokens_BS: Tensor,
    sample_B: Tensor,
    group: dist.ProcessGroup | None,
    *,
    mask_BS: Tensor | None = None,
) -> CoherentLogits:
    """The forward of this rank's samples; all ranks call it together.

    Parameters
    ----------
    model
        Its `layers[i].moe.experts` are `ParallelExperts`.
    sample_B
        Global sample ids, int64.
    mask_BS
        True, or 1, at tokens, which count their positions from 0; padding is left out, and its logits are 0. None:
        there is none.
    """
    real_BS = torch.ones_like(tokens_BS, dtype=torch.bool) if mask_BS is None else mask_BS.bool()
    way, cache_bytes = Coherent(group), 0
    contexts = way.contexts(sample_B, real_BS.sum(dim=1))
    held = Held(model.embed(tokens_BS[real_BS]), contexts.own())
    for layer in model.layers:
        q, kv_T2 = held.projected(layer, contexts)
        kv_G2 = way.shared(kv_T2, held)
        held = way.through(layer, attend_contexts(layer.attention, q, kv_G2, held, contexts), contexts)
        cache_bytes = max(cache_bytes, kv_G2.numel() * kv_G2.element_size())
    logits_TV = model.head(model.norm(way.home(held, contexts.source[held.token]).x))
    logits_BSV = logits_TV.new_zeros(*tokens_BS.shape, logits_TV.shape[1])
    logits_BSV[real_BS] = logits_TV
    return CoherentLogits(logits_BSV, way.traffic, cache_bytes)


class Coherent:
    """The way of tokens between attentions where every rank holds the keys and values of all samples.

    Attributes
    ----------
    traffic
        What it took so far.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.traffic = group, Traffic()

    def contexts(self, sample_B: Tensor, length_B: Tensor) -> Contexts:
        """The samples whose keys and values this rank holds: all; two collectives."""
        return Contexts.gather(sample_B, length_B, self.group)

    def shared(self, kv_T2: Tensor, held: Held) -> Tensor:
        """The keys and values of the tokens of all ranks, `[G, 2, kv heads, d]`; two collectives."""
        counts = Count.start(len(kv_T2), kv_T2.device, self.group).wait()
        arrived, number_G = self.arrived(self.sent(counts, kv_T2, held.token), kv_T2)
        kv_G2 = torch.empty_like(arrived)
        kv_G2[number_G] = arrived
        return kv_G2

    def sent(self, counts: list[int], kv_n2: Tensor, number_n: Tensor) -> Gather:
        """Keys and values with their numbers on their way to all ranks, which have `counts` of them."""
        gather = Gather.start(counts, self.group, kv_n2.flatten(1), number_n.int()[:, None])
        kv_bytes, number_bytes = gather.columns.sizes
        self.traffic = self.traffic + Traffic(
            kv_bytes=gather.received_rows * kv_bytes, ids_bytes=len(kv_n2) * (len(counts) - 1) * number_bytes
        )
        return gather

    def arrived(self, gather: Gather, like_n2: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of all ranks, `[n, 2, kv heads, d]`, and their numbers, int64 `[n]`."""
        kv, number = gather.wait()
        return kv.reshape(len(kv), *like_n2.shape[1:]), number.flatten().long()

    def through(self, layer: Layer, held: Held, contexts: Contexts) -> Held:
        """The tokens that live here after a layer's block: each moved to the device of its first expert."""
        x_TM, experts = layer.moe_norm(held.x), getattr(layer.moe, "experts", None)
        if not isinstance(experts, ParallelExperts):
            return Held(held.x + layer.moe(x_TM), held.token)
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
        self.traffic = self.traffic + experts.traffic
        return Held.summed(y_nM, token_n)

    def home(self, held: Held, source_T: Tensor) -> Held:
        """Tokens that started here, from wherever they are; sources ascend with the numbers; two collectives."""
        route = Route.agree(source_T.bincount(minlength=dist.get_world_size(self.group))[None], self.group)
        kinds = held.x, held.token.int()[:, None]
        columns = Columns.of(*kinds)
        x, token = columns.unpack(route.move(columns.pack(*kinds)))
        self.traffic = self.traffic + Traffic(return_bytes=route.crossing * sum(columns.sizes))
        return Held.ascending(x, token.flatten())
