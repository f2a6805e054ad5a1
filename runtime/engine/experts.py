"""The experts that a device holds, and what they contribute to each token.

Legend: E experts; S slots; m tokens; K experts a token; M hidden size; P token-expert pairs.
"""

import torch
from torch import Tensor, nn

__all__ = ["applied", "keep_experts", "partial_sums", "say_number", "stacked_experts"]


def stacked_experts(module: object) -> int:
    """E, where a module holds nothing but stacked weights `[E, ...]` of all experts of a layer; else 0."""
    if not isinstance(module, nn.Module):
        return 0
    lengths = {len(parameter) if parameter.ndim else 0 for parameter in module.parameters()}
    own = list(module.parameters(recurse=False))
    whole = len(lengths) == 1 and len(own) == len(list(module.parameters())) and any(p.ndim == 3 for p in own)
    return lengths.pop() if whole else 0


def keep_experts(experts: nn.Module, held: list[int]) -> None:
    """Drop from the stacked parameters of `experts` all but those `held`, in this order; the memory is freed."""
    for name, stacked in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(stacked.detach()[held], requires_grad=stacked.requires_grad))


def say_number(experts: nn.Module, num_experts: int) -> None:
    """Tell a module that keeps count of its experts, as those of transformers do, how many it has."""
    if "num_experts" in vars(experts):
        experts.num_experts = num_experts  # type: ignore[assignment]


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
