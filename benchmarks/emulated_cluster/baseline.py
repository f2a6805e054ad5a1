"""The plain expert-parallel layer, as anyone would write it: rows sorted by expert, two all-to-alls.

Inference only; every token-expert pair travels.

Legend: T tokens; K experts a token; M hidden size; E experts, an equal run on each device; D devices; P pairs.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def two_all_to_alls(experts: nn.Module, num_experts: int, x_TM: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """The weighted sum of each token's experts, `[T, M]`; a collective call.

    Parameters
    ----------
    experts
        Those of this device, called as `experts(x_PM, ids_P1, weight_P1)`, ids from 0.
    """
    num_devices, top_k = dist.get_world_size(), ids_TK.shape[1]
    order_P = ids_TK.flatten().argsort(stable=True)
    sent_E = ids_TK.flatten().bincount(minlength=num_experts)
    received_E = torch.empty_like(sent_E)
    dist.all_to_all_single(received_E, sent_E)
    sent = sent_E.view(num_devices, -1).sum(1).tolist()
    arrived_DC = received_E.view(num_devices, -1)  # C experts here
    received = arrived_DC.sum(1).tolist()
    x_PM = x_TM[order_P // top_k]
    here = x_PM.new_empty(sum(received), x_PM.shape[1])
    dist.all_to_all_single(here, x_PM, received, sent)
    expert_P = torch.arange(arrived_DC.shape[1]).repeat(num_devices).repeat_interleave(arrived_DC.flatten())
    y = experts(here, expert_P[:, None], torch.ones(len(here), 1))
    back_PM = torch.empty_like(x_PM)
    dist.all_to_all_single(back_PM, y.contiguous(), sent, received)
    weighted_PM = back_PM * weight_TK.flatten()[order_P, None]
    return torch.zeros_like(x_TM).index_add(0, order_P // top_k, weighted_PM)
