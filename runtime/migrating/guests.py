"""Guests: the samples of a step and the ranks that they are on now, known to every rank.

Legend: B samples that started on this rank; I samples of all ranks; C samples now here, ascending; T tokens now here,
by sample, then position; D devices.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ...errors import UsageError
from ..coherent.contexts import Contexts
from ..engine.route import Route

__all__ = ["Guests"]


@dataclass(frozen=True, slots=True, eq=False)
class Guests:
    """Places of samples at one point of a forward.

    Parameters
    ----------
    home
        The rank that each sample is on, int64 `[I]`; `home_on_device` is the same where the model computes.
    token
        The numbers of the tokens here, int64 `[T]`.
    here, lengths
        The samples here, in 0..I-1, and their tokens, `[C]`.
    """

    contexts: Contexts
    home: NDArray[np.int64]
    home_on_device: Tensor
    token: Tensor
    here: list[int]
    lengths: list[int]

    @classmethod
    def of(cls, contexts: Contexts, home_I: NDArray[np.int64]) -> "Guests":
        """The samples at these homes."""
        rank, first = dist.get_rank(contexts.group), contexts.first
        home = torch.from_numpy(home_I).to(contexts.rank.device)
        token_T = (home[contexts.context] == rank).nonzero().flatten()
        here = np.flatnonzero(home_I == rank).tolist()
        return cls(contexts, home_I, home, token_T, here, [first[i + 1] - first[i] for i in here])

    def home_of(self, token: Tensor) -> Tensor:
        """The rank that tokens are on, int64, by their numbers."""
        return self.home_on_device[self.contexts.context[token]]

    def follow(self, rows: Tensor) -> Tensor:
        """Rows of the samples that started here, `[B, ...]` of any type, where they are: `[C, ...]`, ascending.

        A collective call outside autograd; all but B must be alike on all ranks.
        """
        rank, size = dist.get_rank(self.contexts.group), dist.get_world_size(self.contexts.group)
        to_B = self.home_on_device[self.contexts.rank == rank]
        from_C = self.contexts.rank[self.home_on_device == rank]
        if len(rows) != len(to_B):
            raise UsageError(f"{len(rows)} rows to follow the {len(to_B)} samples that the last forward took here")
        sent, received = ([ranks.bincount(minlength=size).tolist()] for ranks in (to_B, from_C))
        flat = rows.detach()[to_B.argsort(stable=True)].reshape(len(rows), math.prod(rows.shape[1:]))
        arrived = Route(sent, received, self.contexts.group).move(flat.view(torch.uint8))
        return arrived.view(rows.dtype).view(len(from_C), *rows.shape[1:])
