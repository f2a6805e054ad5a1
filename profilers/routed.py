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
    """The weighted sum of each token's experts, `[T, M]`, over the tokens sorted by expert.

    All experts go through one grouped product where there is one, else one after another.

    Parameters
    ----------
    w_in
        `[E, H, M]`; or `[E, 2 H, M]`, gate above up: the inner vector is then silu(gate) * up instead of silu.
    w_out
        `[E, M, H]`.
    """
    ids_P, order_P = ids_TK.flatten().sort(stable=True)
    end_E = torch.searchsorted(ids_P, torch.arange(len(w_in), device=ids_P.device), right=True, out_int32=True)
    products = grouped if _has_grouped(x_TM, w_in, w_out) else looped
    sorted_PM = products(x_TM[order_P // ids_TK.shape[1]], end_E, w_in, w_out)
    y_TKM = sorted_PM[order_P.argsort()].view(*ids_TK.shape, x_TM.shape[-1])
    y_TM: Tensor = (weights_TK.unsqueeze(-1) * y_TKM).sum(1)
    return y_TM


def looped(x_PM: Tensor, end_E: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Outputs of experts for rows by expert, `[P, M]`, one expert after another; its rows end at `end_E`."""
    groups = torch.split(x_PM, end_E.diff(prepend=end_E.new_zeros(1)).tolist())
    inner = (_inner(functional.linear(x, w), w_out.shape[2]) for x, w in zip(groups, w_in, strict=True))
    return torch.cat([x_PM[:0], *map(functional.linear, inner, w_out)])


def grouped(x_PM: Tensor, end_E: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Experts' outputs by one product of all for gate and up, and one for down; the host waits for nothing."""
    inner_PH = _inner(functional.grouped_mm(x_PM, w_in.mT, offs=end_E), w_out.shape[2])
    return functional.grouped_mm(inner_PH, w_out.mT, offs=end_E)


def _has_grouped(x_TM: Tensor, w_in: Tensor, w_out: Tensor) -> bool:
    """Check for bfloat16 in rows of 16 bytes on a GPU, and a torch, that have the product (torch 2.10)."""
    types, widths = {x_TM.dtype, w_in.dtype, w_out.dtype}, (*w_in.shape[1:], *w_out.shape[1:])
    return (
        hasattr(functional, "grouped_mm")
        and w_in.is_cuda
        and len(x_TM) > 0
        and types == {torch.bfloat16}
        and not any(width % 8 for width in widths)
        and torch.cuda.get_device_capability(w_in.device) >= (8, 0)
    )


def _inner(projected: Tensor, ffn: int) -> Tensor:
    gate = functional.silu(projected[..., :ffn])
    return gate if projected.shape[-1] == ffn else gate * projected[..., ffn:]
