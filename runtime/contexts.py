"""Contexts: whose every token is, on every rank.

Legend: B samples of this rank; I samples of all ranks; D devices; G tokens of all ranks, numbered by rank, then sample,
then position.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Splits

__all__ = ["Contexts"]


@dataclass(frozen=True, slots=True)
class Contexts:
    """Whose every token is: the samples of all ranks, which every rank gathers before the first layer.

    Parameters
    ----------
    first
        The number of each sample's first token and, last, the number of all tokens, `[I + 1]`.
    sample
        Each token's global sample id, int64 `[G]`.
    context, position, source
        Each token's sample in 0..I-1, its place in it, and the rank it started on, int64 `[G]`.
    """

    first: list[int]
    sample: Tensor
    context: Tensor
    position: Tensor
    source: Tensor
    group: dist.ProcessGroup | None

    @classmethod
    def gather(cls, sample_B: Tensor, length: int, group: dist.ProcessGroup | None) -> "Contexts":
        """The contexts of all ranks, from this rank's sample ids and their common length; a collective call."""
        mine_B2 = torch.stack([sample_B, torch.full_like(sample_B, length)], dim=1)
        splits = Splits.to_all(mine_B2, group)
        sample_I, length_I = splits.exchange_all(mine_B2).unbind(1)
        end_I, device = length_I.cumsum(0), sample_B.device
        context_G = torch.arange(len(length_I), device=device).repeat_interleave(length_I)
        position_G = torch.arange(len(context_G), device=device) - (end_I - length_I)[context_G]
        samples_D = torch.tensor(splits.received, device=device)
        rank_I = torch.arange(len(samples_D), device=device).repeat_interleave(samples_D)
        return cls([0, *end_I.tolist()], sample_I[context_G], context_G, position_G, rank_I[context_G], group)

    def own(self) -> Tensor:
        """The numbers of the tokens that start on this rank, ascending."""
        return (self.source == dist.get_rank(self.group)).nonzero().flatten()
