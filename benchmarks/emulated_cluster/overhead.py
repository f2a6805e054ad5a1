"""What the runtime adds to a layer, under a contiguous plan and in one chunk, beside two all-to-alls by hand."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moeplan.profilers.cluster import Cluster
from moeplan.runtime import parallelize
from moeplan.solvers import contiguous

from .calibration import Profile
from .case import Case, Figure, Measured
from .model import EmulatedModel, Sizes, Waiter, WaitingExperts
from .routing import Workload, plan_of
from .timing import Seconds, interleaved, ratio

WAYS = ("two all-to-alls by hand", "moeplan, contiguous, degree 1")
SHAPES = ((8, 1), (128, 1), (128, 2))  # tokens a rank, experts per token
EXPERTS_A_DEVICE = 4
MORE_ROUNDS = 3  # times as many: a layer is short
SEED = 13
BLOCK = "layers.0.moe"


@dataclass(frozen=True, slots=True)
class Shape:
    """A step of one layer whose experts take no time."""

    name: str
    work: Workload
    sizes: Sizes


class _ByHand(nn.Module):
    """Experts of the whole block, reached by two all-to-alls."""

    def __init__(self, num_experts: int, cluster: Cluster) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.local = WaitingExperts(num_experts // cluster.num_devices, Waiter(), 0.0, 0.0)

    def forward(self, x_TM: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
        return two_all_to_alls(self.local, self.num_experts, x_TM, ids_TK, weight_TK)


def two_all_to_alls(experts: nn.Module, num_experts: int, x_TM: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """The plain expert-parallel layer: rows sorted by expert, two all-to-alls; a collective call, inference only.

    It gives the weighted sum of each token's experts, `[T, M]`; every token-expert pair travels.

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


def _prepare(cluster: Cluster) -> list[Shape]:
    rng, num_experts = np.random.default_rng(SEED), EXPERTS_A_DEVICE * cluster.num_devices
    sizes = Sizes(num_experts=num_experts, start_s=0.0, pair_s=0.0, attention_s=0.0)
    shapes = []
    for tokens, top_k in SHAPES:
        kinds = np.arange(tokens * cluster.num_devices).reshape(cluster.num_devices, tokens)
        ids = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(kinds.size)])[:, None]
        shapes.append(Shape(f"{cluster} {tokens} tokens, K={top_k}", Workload(ids, kinds, num_experts), sizes))
    return shapes


def _run(cluster: Cluster, rank: int, _profile: Profile, shapes: list[Shape], rounds: int) -> Measured:
    found: dict[str, Seconds] = {}
    for shape in shapes:
        tokens = torch.as_tensor(shape.work.of_rank(rank, cluster.num_devices))
        placement = contiguous.solve(1, shape.work.num_experts, cluster).placement
        plan = plan_of(cluster, shape.work, shape.sizes, placement)
        by_hand = EmulatedModel(shape.work.ids, shape.sizes)
        by_hand.get_submodule(BLOCK).experts = _ByHand(shape.work.num_experts, cluster)
        ours = parallelize(EmulatedModel(shape.work.ids, shape.sizes), plan)
        with torch.inference_mode():
            ours(tokens)  # which tells the experts what the tokens are
            x = by_hand.embed(tokens)
            blocks = [model.get_submodule(BLOCK) for model in (by_hand, ours.model)]
            calls = {f"{shape.name}/{way}": partial(block, x) for way, block in zip(WAYS, blocks, strict=True)}
            found |= interleaved(calls, MORE_ROUNDS * rounds)
    return found


def _told(_cluster: Cluster, _profile: Profile, shapes: list[Shape], measured: Measured) -> list[Figure]:
    figures = []
    for shape in shapes:
        first, second = (measured[f"{shape.name}/{way}"] for way in WAYS)
        figures.append(Figure(shape.name, WAYS[0], first, ratio=(1.0, 1.0, 1.0)))
        slower = {"takes, x": ratio(second, first)[0]}
        figures.append(Figure(shape.name, WAYS[1], second, ratio=ratio(first, second), told=slower))
    return figures


OVERHEAD = Case(_prepare, _run, _told)
