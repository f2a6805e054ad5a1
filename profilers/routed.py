"""The routed block's own compute: called by `runtime` on every rank, measured by the case `routed_block`.

Legend: m tokens; K experts per token; M hidden size; P token-expert pairs; E experts; H expert FFN size.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [P, M], places [P, 1], gate weights [P, 1] -> [P, M]


def applied(experts: Experts, x_PM: Tensor, slot_P1: Tensor, weight_P1: Tensor) -> Tensor:
    """Outputs of local experts for rows, one expert each, times its gate weight, `[P, M]`."""
    if not len(x_PM):
        return torch.zeros_like(x_PM)
    y_PM = experts(x_PM.contiguous(), slot_P1, weight_P1)
    return y_PM.to(x_PM.dtype)


def partial_sums(experts: Experts, x_mM: Tensor, slot_mK: Tensor, weight_mK: Tensor) -> tuple[Tensor, int]:
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


def weighted_experts(x_TM: Tensor, ids_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """The weighted sum of each token's experts, `[T, M]`, one expert after another over the tokens sorted by expert.

    Parameters
    ----------
    w_in
        `[E, H, M]`; or `[E, 2 H, M]`, gate above up: the inner vector is then silu(gate) * up instead of silu.
    w_out
        `[E, M, H]`.
    """
    order = ids_TK.flatten().argsort(stable=True)
    sizes_E = ids_TK.flatten().bincount(minlength=len(w_in)).tolist()
    groups = torch.split(x_TM[order // ids_TK.shape[1]], sizes_E)
    inner = (_inner(functional.linear(x, w), w_out.shape[2]) for x, w in zip(groups, w_in, strict=True))
    sorted_PM = torch.cat([x_TM[:0], *map(functional.linear, inner, w_out)])
    y_TKM = sorted_PM[order.argsort()].view(*ids_TK.shape, x_TM.shape[-1])
    y_TM: Tensor = (weights_TK.unsqueeze(-1) * y_TKM).sum(1)
    return y_TM


def _inner(projected: Tensor, ffn: int) -> Tensor:
    gate = functional.silu(projected[..., :ffn])
    return gate if projected.shape[-1] == ffn else gate * projected[..., ffn:]
