"""Routed blocks of a model, the stacked experts that a device holds of them, and what these add to each token.

Legend: E experts; S slots; m tokens; K experts a token; M hidden size; P token-expert pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import UsageError


@dataclass(frozen=True, slots=True)
class RoutedBlock:
    """A block whose `experts` are called as `experts(x_TM, ids_TK, weights_TK)`."""

    name: str  #: Of the block in the model, "" for the model itself
    module: nn.Module
    num_experts: int
    top_k: int | None  #: None where its router does not say

    @property
    def experts(self) -> nn.Module:
        """The module of its experts."""
        experts: nn.Module = self.module.get_submodule("experts")
        return experts

    @property
    def experts_name(self) -> str:
        """The path of its experts in the model."""
        return f"{self.name}.experts" if self.name else "experts"


def routed_blocks(model: nn.Module) -> list[RoutedBlock]:
    """The routed blocks of a model.

    Raises
    ------
    UsageError
        There are none, or it was parallelized before.
    """
    blocks = []
    for name, module in model.named_modules():
        if num_experts := _stacked_experts(getattr(module, "experts", None)):
            router = getattr(module, "router", None) or getattr(module, "gate", None)
            blocks.append(RoutedBlock(name, module, num_experts, getattr(router, "top_k", None)))
    if not blocks:
        raise UsageError(
            f"{type(model).__name__} has no routed blocks (a router beside `experts` with stacked weights, as in"
            " transformers 5), or was parallelized before; give a whole Mixture-of-Experts model"
        )
    return blocks


def keep_experts(experts: nn.Module, held: list[int]) -> None:
    """Drop from the stacked parameters of `experts` all but those `held`, in this order; the memory is freed."""
    for name, stacked in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(stacked.detach()[held], requires_grad=stacked.requires_grad))


def applied(experts: nn.Module, x_PM: Tensor, slot_P1: Tensor, weight_P1: Tensor) -> Tensor:
    """Outputs of local experts for rows, one expert each, times its gate weight, `[P, M]`."""
    if not len(x_PM):
        return torch.zeros_like(x_PM)
    y_PM: Tensor = experts(x_PM.contiguous(), slot_P1, weight_P1)
    return y_PM.to(x_PM.dtype)


def partial_sums(experts: nn.Module, x_mM: Tensor, slot_mK: Tensor, weight_mK: Tensor) -> tuple[Tensor, int]:
    """The gate-weighted sum over the local experts of each token, `[m, M]`, and the token-expert pairs there were.

    Parameters
    ----------
    slot_mK
        The place in `experts` of each expert asked for, -1 where there is none.
    """
    slot_P = slot_mK.flatten()
    pair_P = (slot_P >= 0).nonzero().flatten()
    row_P = pair_P // slot_mK.shape[1]
    y_PM = applied(experts, x_mM[row_P], slot_P[pair_P, None], weight_mK.flatten()[pair_P, None])
    return torch.zeros_like(x_mM).index_add_(0, row_P, y_PM), len(pair_P)


def _stacked_experts(module: object) -> int:
    """E, where a module holds nothing but stacked weights `[E, ...]` of all experts of a layer; else 0."""
    if not isinstance(module, nn.Module):
        return 0
    lengths = {len(parameter) if parameter.ndim else 0 for parameter in module.parameters()}
    own = list(module.parameters(recurse=False))
    whole = len(lengths) == 1 and len(own) == len(list(module.parameters())) and any(p.ndim == 3 for p in own)
    return lengths.pop() if whole else 0
