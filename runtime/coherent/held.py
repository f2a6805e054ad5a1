"""Tokens that a rank holds at some point of a forward, ascending by their numbers.

Legend: T tokens; M hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.protocols import Layer
from .contexts import Contexts

__all__ = ["Held"]


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
        return cls(y_nM.new_zeros(len(token), y_nM.shape[1]).index_add(0, row_n, y_nM), token)

    def projected(self, layer: Layer, contexts: Contexts) -> tuple[Tensor, Tensor]:
        """Queries `[T, heads, d]`; keys and values together `[T, 2, kv heads, d]`."""
        q, k, v = layer.attention.project(layer.attention_norm(self.x), contexts.position[self.token])
        return q, torch.stack([k, v], dim=1)
