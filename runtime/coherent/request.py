"""A request for generation, and that all ranks make the same.

Legend: B samples of this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UsageError
from ..engine.gather import gathered

__all__ = ["Request"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """Prompts of this rank and the ends of their continuations.

    Parameters
    ----------
    prompts
        Tokens, int64, one dimension and at least one token each, `[B]` of them.
    samples
        Their global ids, int64 `[B]`.
    max_new_tokens
        At least 1.
    eos
        A token that ends its sample, itself included; None: none does.
    num_tokens
        Of the model's vocabulary; None where it is not known.
    """

    prompts: Sequence[Tensor]
    samples: Tensor
    max_new_tokens: int
    eos: int | None
    num_tokens: int | None

    def agree(self, group: dist.ProcessGroup | None) -> None:
        """See that all ranks ask for as much, and can be answered; a collective call.

        Raises
        ------
        UsageError
            On every rank, what is wrong with the request of any.
        """
        mine = self.max_new_tokens, self.eos, self._problem()
        stated = gathered(mine, group)
        for rank, (most, eos, problem) in enumerate(stated):
            if problem is not None:
                raise UsageError(f"rank {rank}: {problem}")
            if (most, eos) != stated[0][:2]:
                raise UsageError(
                    f"rank {rank} asks for {most} new tokens until {eos}, rank 0 for {stated[0][0]} until"
                    f" {stated[0][1]}; ask for the same on every rank"
                )

    def _problem(self) -> str | None:
        """Why this rank's request cannot be answered."""
        if self.max_new_tokens < 1:
            return f"{self.max_new_tokens} new tokens; expected 1 or more"
        for place, prompt in enumerate(self.prompts):
            if prompt.ndim != 1 or not len(prompt) or prompt.dtype != torch.int64:
                return (
                    f"prompt {place} is {prompt.dtype} {list(prompt.shape)}; expected int64 tokens in one dimension, at"
                    " least one"
                )
            low, high = int(prompt.min()), int(prompt.max())
            if low < 0 or (self.num_tokens is not None and high >= self.num_tokens):
                return f"prompt {place} has tokens {low} to {high}; expected 0 to {(self.num_tokens or 0) - 1}"
        if self.samples.shape != (len(self.prompts),):
            return f"sample ids {list(self.samples.shape)} for {len(self.prompts)} prompts; expected one each"
        return None
