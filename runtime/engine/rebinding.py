"""The move of experts from one placement of a layer to another.

Legend: D devices; S slots of this rank; n rows that this rank sends or receives.
"""

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .layer_placement import LayerPlacement, Slots
from .payload import Columns
from .route import Route


@dataclass(frozen=True, slots=True)
class Moves:
    """Rows of experts that one rank sends and receives when a layer's slots change.

    Parameters
    ----------
    sent_slots, filled_slots
        The slots of this rank that rows are read from, by destination, and written to, by source, `[n]`.
    sent, received
        Rows to and from each device, `[D]`.
    """

    sent_slots: list[int]
    sent: list[int]
    filled_slots: list[int]
    received: list[int]

    @classmethod
    def between(cls, old: Slots, new: Slots, *, devices_per_node: int, rank: int, size: int) -> "Moves":
        """The moves of `rank`, which agree with those of all others: each expert comes from its nearest holder.

        A slot that keeps its expert is left alone.
        """
        before, after = _experts_by_device(old, size), _experts_by_device(new, size)
        slots = [{expert: slot for slot, expert in enumerate(held)} for held in before]
        sent, filled = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for target, experts in enumerate(after):
            for slot, expert in enumerate(experts):
                if before[target][slot : slot + 1] == [expert]:
                    continue
                holders = [device for device in range(size) if expert in slots[device]]
                source = min(holders, key=lambda device: _distance(device, target, devices_per_node))
                if source == rank:
                    sent[target].append(slots[source][expert])
                if target == rank:
                    filled[source].append(slot)
        return cls(*_by_device(sent, size), *_by_device(filled, size))


@torch.no_grad()
def move_experts(experts: nn.Module, old: LayerPlacement, new: LayerPlacement, group: dist.ProcessGroup | None) -> None:
    """Overwrite the rows of this rank's slots with the experts that another placement puts there; a collective call.

    Parameters stay the same objects. Gradients go with their experts where any rank has some; those of replicas are
    alike on all holders, as `ReplicaSums` leaves them. Both placements have as many slots on this rank.
    """
    moves = Moves.between(
        old.slots,
        new.slots,
        devices_per_node=new.devices_per_node,
        rank=dist.get_rank(group),
        size=dist.get_world_size(group),
    )
    tensors = _stacked(experts, group)
    rows = [_rows(tensor) for tensor in tensors]
    columns = Columns.of(*rows)
    sent_n = torch.tensor(moves.sent_slots, dtype=torch.int64, device=rows[0].device)
    packed = columns.pack(*(row_SW[sent_n] for row_SW in rows))
    arrived = columns.unpack(Route([moves.sent], [moves.received], group).move(packed))
    filled_n = torch.tensor(moves.filled_slots, dtype=torch.int64, device=rows[0].device)
    for tensor, row_nW in zip(tensors, arrived, strict=True):
        tensor[filled_n] = row_nW.reshape(len(filled_n), *tensor.shape[1:])


def _stacked(experts: nn.Module, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The parameters `[S, ...]`, and the gradients of those that have one on any rank, zero where they had none."""
    parameters = list(experts.parameters())
    graded = torch.tensor([int(parameter.grad is not None) for parameter in parameters], device=parameters[0].device)
    dist.all_reduce(graded, dist.ReduceOp.MAX, group)
    gradients = []
    for parameter, has_one in zip(parameters, graded.tolist(), strict=True):
        if has_one:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(parameter.grad)
    return [*parameters, *gradients]


def _rows(tensor: Tensor) -> Tensor:
    """A stacked tensor as rows, `[S, width]`."""
    return tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))


def _experts_by_device(slots: Slots, size: int) -> list[list[int]]:
    """The experts in the slots of each device, `[D]`."""
    held: list[list[int]] = [[] for _ in range(size)]
    for expert, device in zip(slots.expert.tolist(), slots.device.tolist(), strict=True):
        held[device].append(expert)
    return held


def _distance(device: int, target: int, devices_per_node: int) -> tuple[bool, bool, int]:
    """Order of holders: the device itself, its node, the lowest rank."""
    return device != target, device // devices_per_node != target // devices_per_node, device


def _by_device(slots: dict[int, list[int]], size: int) -> tuple[list[int], list[int]]:
    """Slots by device, one list behind the other, and how many each has."""
    lists = [slots.get(device, []) for device in range(size)]
    return list(itertools.chain(*lists)), list(map(len, lists))
