"""Contexts: whose every token is, on every rank; and the tokens that a rank holds at some point of a forward.

Legend: B samples of this rank; I samples of all ranks; D devices; G tokens of all ranks, numbered by rank, then sample,
then position; T tokens that this rank holds, their numbers ascending; M hidden size.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ...profilers.stopwatch import lap
from ..engine.gather import Count, Gather
from ..models.protocols import Layer


@dataclass(frozen=True, slots=True)
class Contexts:
    """Samples of all ranks and the tokens of each, which every rank gathers before the first layer."""

    first: list[int]  #: The number of each sample's first token and, last, the number of all tokens, `[I + 1]`
    sample: Tensor  #: Each token's global sample id, int64 `[G]`
    #: context, position, source: each token's sample in 0..I-1, its place in it, and the rank it started on, int64
    #: `[G]`
    context: Tensor
    position: Tensor
    source: Tensor
    rank: Tensor  #: The one each sample started on, int64 `[I]`
    #: begin, length: the number of each sample's first token, and how many tokens it has, int64 `[I]`
    begin: Tensor
    length: Tensor
    group: dist.ProcessGroup | None

    @classmethod
    def gather(cls, sample_B: Tensor, length_B: Tensor, group: dist.ProcessGroup | None) -> "Contexts":
        """The contexts of all ranks, from this rank's sample ids and their lengths, int64; a collective call."""
        mine_B2 = torch.stack([sample_B, length_B], dim=1)
        counts = Count.start(len(mine_B2), mine_B2.device, group).wait()
        sample_I, length_I = Gather.start(counts, group, mine_B2).wait()[0].unbind(1)
        samples_D = torch.tensor(counts, device=sample_B.device)
        rank_I = torch.arange(len(samples_D), device=sample_B.device).repeat_interleave(samples_D)
        return cls.of(sample_I, length_I, rank_I, group)

    @classmethod
    def of(cls, sample_I: Tensor, length_I: Tensor, rank_I: Tensor, group: dist.ProcessGroup | None) -> "Contexts":
        """Contexts of samples with these ids and lengths that started on these ranks, int64."""
        end_I, device = length_I.cumsum(0), length_I.device
        begin_I, first = end_I - length_I, [0, *end_I.tolist()]
        context_G = torch.arange(len(length_I), device=device).repeat_interleave(length_I)
        position_G = torch.arange(first[-1], device=device) - begin_I[context_G]
        source_G = rank_I[context_G]
        return cls(first, sample_I[context_G], context_G, position_G, source_G, rank_I, begin_I, length_I, group)

    def own(self) -> Tensor:
        """The numbers of the tokens that start on this rank, ascending."""
        return (self.source == dist.get_rank(self.group)).nonzero().flatten()

    def after(self, step: int) -> "Contexts":
        """Contexts of one token of every sample, `step` behind its last; such a token has the number of its sample."""
        context_I = torch.arange(len(self.rank), device=self.rank.device)
        sample_I, position_I = self.sample[self.begin], self.length + step
        return replace(self, sample=sample_I, context=context_I, position=position_I, source=self.rank)

    def row(self, context: Tensor, position: Tensor) -> Tensor:
        """Rows of positions among a layer's keys and values: tokens by number, then later ones by step.

        A position past a sample's tokens is that of a step of generation, in which every sample has a row.
        """
        step = position - self.length[context]
        return torch.where(step < 0, self.begin[context] + position, self.first[-1] + step * len(self.rank) + context)


@dataclass(frozen=True, slots=True)
class Held:
    """Tokens that a rank holds: their hidden vectors, or other rows, `[T, ...]`, and their numbers, int64 `[T]`."""

    x: Tensor
    token: Tensor

    @classmethod
    def ascending(cls, x: Tensor, token: Tensor) -> "Held":
        """Tokens in any order."""
        order = token.argsort()
        return cls(x[order], token[order].long())

    @classmethod
    def summed(cls, y_nM: Tensor, token_n: Tensor) -> "Held":
        """Tokens of which there are several partial sums."""
        token, row_n = torch.unique(token_n, return_inverse=True)
        with lap("combine"):
            sums_TM = y_nM.new_zeros(len(token), y_nM.shape[1])
            return cls(sums_TM.index_add_(0, row_n, y_nM.contiguous()), token)  # in place: many times as fast

    def projected(self, layer: Layer, contexts: Contexts) -> tuple[Tensor, Tensor]:
        """Queries `[T, heads, d]`; keys and values together `[T, 2, kv heads, d]`."""
        q, k, v = layer.attention.project(layer.attention_norm(self.x), contexts.position[self.token])
        return q, torch.stack([k, v], dim=1)
