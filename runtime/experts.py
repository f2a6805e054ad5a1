"""The experts that a device holds, and what they contribute to each token.

Legend: E experts; m tokens; K experts a token; M hidden size.
"""

import torch
from torch import Tensor, nn

from .model import Experts
from .stopwatch import lap

__all__ = ["keep_experts", "partial_sums"]


def keep_experts(experts: Experts, held: list[int]) -> None:
    """Drop from the stacked parameters of `experts` all but those `held`, in this order; the memory is freed."""
    for name, stacked in list(experts.named_parameters()):
        kept = nn.Parameter(stacked.detach()[held], requires_grad=stacked.requires_grad)
        setattr(experts, name, kept)


def partial_sums(experts: Experts, x_mM: Tensor, slot_mK: Tensor, weight_mK: Tensor) -> Tensor:
    """The gate-weighted sum over the local experts of each token, `[m, M]`.

    Parameters
    ----------
    slot_mK
        The place in `experts` of each expert asked for, -1 where there is none.
    """
    num_slots, top_k = len(experts.w_in), slot_mK.shape[1]
    slot_P = slot_mK.flatten()
    sizes = (slot_P + 1).bincount(minlength=num_slots + 1).tolist()
    pair_P = slot_P.argsort(stable=True)[sizes[0] :]
    row_P = pair_P // top_k
    groups = torch.split(x_mM[row_P], sizes[1:])
    with lap("experts"):
        y_PM = torch.cat([x_mM[:0], *(experts(group, slot) for slot, group in enumerate(groups))])
    weighted_PM = (weight_mK.flatten()[pair_P, None] * y_PM).to(x_mM.dtype)
    return torch.zeros_like(x_mM).index_add(0, row_P, weighted_PM)
