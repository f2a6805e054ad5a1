"""The plain expert-parallel layer: a row a token-expert pair, one all-to-all there and one back, nothing else."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.splits, ctx.group = (received, sent), group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.splits
        rows = grads[0].new_empty(sum(received), *grads[0].shape[1:])
        dist.all_to_all_single(rows, grads[0].contiguous(), received, sent, ctx.group)
        return rows, None, None, None


class PlainLayer(nn.Module):
    """Experts `[rank * E/D, (rank + 1) * E/D)` of a stack are this rank's."""

    def __init__(self, experts: nn.Module, num_experts: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.experts, self.num_experts, self.group = experts, num_experts, group

    def forward(self, x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        size = dist.get_world_size(self.group)
        local = self.num_experts // size
        order = ids.flatten().argsort(stable=True)
        count = ids.flatten().bincount(minlength=self.num_experts)
        counts = torch.empty_like(count)
        dist.all_to_all_single(counts, count, group=self.group)
        sent, received = count.view(size, local).sum(1).tolist(), counts.view(size, local).sum(1).tolist()
        rows = _Exchange.apply(x[order // ids.shape[1]], sent, received, self.group)  # type: ignore[no-untyped-call]
        slot = torch.arange(local).repeat(size).repeat_interleave(counts)
        y = self.experts(rows, slot[:, None], torch.ones(len(rows), 1, dtype=x.dtype))
        back = _Exchange.apply(y, received, sent, self.group)  # type: ignore[no-untyped-call]
        weighted = back * weight.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // ids.shape[1], weighted)
