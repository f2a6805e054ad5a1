"""Ways of tokens between attentions, which say whose keys and values a rank holds.

Legend: B samples of this rank; G tokens of all ranks, numbered by rank, then sample, then position; T tokens that this
rank holds, their numbers ascending; K experts per token; M hidden size; n rows.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.gather import Count, Gather
from ..engine.layer import ParallelExperts
from ..engine.payload import Columns
from ..engine.route import Route
from ..engine.traffic import Traffic
from ..models.protocols import Layer
from .contexts import Contexts, Held


@dataclass(eq=False)
class Way:
    """Way of tokens among the ranks of a group, and the traffic so far."""

    group: dist.ProcessGroup | None
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(eq=False)
class Coherent(Way):
    """Context-coherent dispatch (ExFlow): a token lives where its first expert is; every rank holds all samples."""

    devices_per_node: int = field(kw_only=True)

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
        rows = kv_n2.flatten(1), number_n.int()[:, None]
        gather = Gather.start(counts, self.group, *rows, devices_per_node=self.devices_per_node)
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
        route, _ = Route.agree(source_T.bincount(minlength=dist.get_world_size(self.group))[None], self.group)
        kinds = held.x, held.token.int()[:, None]
        columns = Columns.of(*kinds)
        x, token = columns.unpack(route.move(columns.pack(*kinds)))
        self.traffic = self.traffic + Traffic(return_bytes=route.crossing * sum(columns.sizes))
        return Held.ascending(x, token.flatten())


class Resident(Way):
    """Standard dispatch: tokens live where their sample started and return to it; a rank holds its own samples only."""

    def contexts(self, sample_B: Tensor, length_B: Tensor) -> Contexts:
        """The samples whose keys and values this rank holds: its own."""
        return Contexts.of(sample_B, length_B, torch.full_like(sample_B, dist.get_rank(self.group)), self.group)

    def shared(self, kv_T2: Tensor, _held: Held) -> Tensor:
        """The keys and values as they are."""
        return kv_T2

    def through(self, layer: Layer, held: Held, contexts: Contexts) -> Held:
        """Tokens after a layer's block, on the ranks where they were."""
        experts = getattr(layer.moe, "experts", None)
        if isinstance(experts, ParallelExperts):
            experts.begin(contexts.sample[held.token], contexts.position[held.token])
        y_TM = layer.moe(layer.moe_norm(held.x))
        if isinstance(experts, ParallelExperts):
            self.traffic = self.traffic + experts.traffic
        return Held(held.x + y_TM, held.token)
