"""What four ranks find of the engine's layer and of experts that change places, in one world for all its tests."""

import functools
import time
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moeplan.planner.demo.model import Experts
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.stopwatch import lap, stopwatch
from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.engine.chunks import Chunks
from moeplan.runtime.engine.experts import keep_experts
from moeplan.runtime.engine.layer import ParallelExperts, rebind
from moeplan.runtime.engine.layer_placement import LayerPlacement
from moeplan.runtime.engine.route import Route
from moeplan.runtime.expert_parallel import ExpertParallelModel
from moeplan.runtime.whole import full_state_dict
from moeplan.solvers import contiguous
from moeplan.solvers.placement import Placement
from tests.runtime.rank_cases import Case
from tests.runtime.worlds import Alive, by_rank, own, refusal_of

CASE = Case("standard", (3, 2, 2, 2), (0, 0, 0, 0), top_k=2, rule="even", seed=3, num_layers=1)
TOKENS = (9, 4, 0, 6)
DEGREES = [(1, 1), (2, 2), (4, 1), (2, 3)]
NUM_TOKENS, NUM_EXPERTS, HIDDEN, FFN = 512, 8, 256, 64
TOP_KS = (1, 2, 4)


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


@dataclass(frozen=True)
class Found:
    """What a rank finds: outputs and gradients by x for each of `DEGREES`, peaks for each of `TOP_KS`, a late lap, and
    what it has of experts that change places, by case.
    """

    buffers: list[tuple[np.ndarray, np.ndarray]]
    peaks: list[list[int]]
    lap_s: float
    moved: list["Moved"]


@functools.cache
def found_by_four() -> list[Found]:
    """By rank."""
    return by_rank(4, _find)


def _find(world: World, _payload: None) -> Found:
    return Found(
        buffers=[_buffers(world.rank, *degrees) for degrees in DEGREES],
        peaks=[_peaks(world.rank, top_k) for top_k in TOP_KS],
        lap_s=_late(world),
        moved=[_moved(world, case) for case in MOVING.values()],
    )


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS[rank], 16, generator=generator, dtype=torch.float64)
    weight, ids = torch.rand(TOKENS[rank], 8, generator=generator, dtype=torch.float64).topk(2)
    return x, ids, weight


def experts() -> Experts:
    torch.manual_seed(1)
    return Experts(8, 16, 12).double()


def _buffers(rank: int, forward: int, backward: int) -> tuple[np.ndarray, np.ndarray]:
    whole, placement = experts(), CASE.placement()
    chunks = Chunks.of([1 / forward] * forward, [1 / backward] * backward, capacity_factor=1.0)
    here = LayerPlacement.of(placement, 0, devices_per_node=4, group=None)
    keep_experts(whole, here.owned)
    layer = ParallelExperts(whole, here, None, chunks=chunks)
    x, ids, weight = inputs(rank)
    x.requires_grad_()
    y = layer(x, ids, weight)
    (y * torch.arange(16)).sum().backward()
    assert x.grad is not None
    return y.detach().numpy(), x.grad.numpy()


def _peaks(rank: int, top_k: int) -> list[int]:
    """Of the plain layer, then ours in one chunk and in four."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    weight, ids = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(top_k)
    placement = contiguous.solve(1, NUM_EXPERTS, Cluster(1, 4)).placement

    def own() -> Experts:
        return Experts(NUM_EXPERTS // 4, HIDDEN, FFN)

    def ours(degree: int) -> torch.nn.Module:
        chunks = Chunks.of([1 / degree] * degree, [1 / degree] * degree)
        here = LayerPlacement.of(placement, 0, devices_per_node=4, group=None)
        return ParallelExperts(own(), here, None, chunks=chunks)

    layers = [PlainLayer(own(), NUM_EXPERTS, None), ours(1), ours(4)]
    return [_peak(layer, x.clone().requires_grad_(), ids, weight.clone().requires_grad_()) for layer in layers]


def _peak(layer: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> int:
    """The most bytes alive in a forward and a backward pass, beyond what was there."""
    with Alive() as alive:
        y = layer(x, ids, weight)
        (y * y).sum().backward()
    return int(alive.most)


def _late(world: World) -> float:
    """The seconds of a lap to which every other rank comes late."""
    with stopwatch() as laps:
        time.sleep(0.3 * (world.rank % 2))
        with lap("dispatch"):
            pass
    return laps["dispatch"][0]


MOVING = {
    "in chunks": Case(
        "standard", (2, 2, 2, 2), (2, 3, 1, 2), forward=(2, 3, 1), backward=(1, 2, 4), gradients=True, seed=60
    ),
    "replicas on two nodes": Case(
        "standard", (3, 3, 3, 3), (2, 3, 1, 2), nodes=2, rule="even", gradients=True, seed=61
    ),
    "unequal slots": Case("standard", (1, 4, 0, 5), (2, 0, 1, 2), top_k=4, gradients=True, seed=62),
}
STEPS, MICRO, RATE = 4, 2, 0.05


@dataclass(frozen=True)
class Moved:
    """What a rank has: logits of every micro-batch, the whole model (rank 0), rows it sent, and what was refused.

    `resized` are logits before and after a move to one slot more.
    """

    logits: list[list[Tensor]]
    state: dict[str, Tensor]
    sent: list[int]
    refused: str
    resized: list[Tensor]


def placements(case: Case) -> list[Placement]:
    """Two that alternate."""
    return [case.placement(), replace(case, seed=case.seed + 100).placement()]


def micro_batches(case: Case) -> list[list[Tensor]]:
    """Tokens of all ranks, `[I, S]`, by step and micro-batch."""
    return [
        [replace(case, seed=case.seed + 10 * step + part).tokens() for part in range(MICRO)] for step in range(STEPS)
    ]


def in_one_process(case: Case) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """The logits of every micro-batch, and the model after all steps."""
    model, logits = case.model(), []
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in micro_batches(case):
        logits.append([_backward(case, model, tokens, slice(None)) for tokens in step])
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(case.slots)
        optimizer.step()
        optimizer.zero_grad()
    return logits, model.state_dict()


def _moved(world: World, case: Case) -> Moved:
    """Train while experts change places before every micro-batch, between two of one step with their gradients."""
    mine = own(case.batches, world.rank)
    spread = parallelize(case.model(), case.plan())
    model = DistributedDataParallel(spread)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    logits, sent, turn = list[list[Tensor]](), list[int](), 0
    for step in micro_batches(case):
        logits.append([])
        for tokens in step:
            turn += 1
            sent.append(_rebind(case, spread, placements(case)[turn % 2]))
            with model.no_sync():
                logits[-1].append(_backward(case, model, tokens, mine))
        _average(spread)
        optimizer.step()
        optimizer.zero_grad()
    state, other = full_state_dict(spread), replace(case, slots=tuple(slots + 1 for slots in case.slots)).placement()
    with torch.no_grad():
        resized = [spread(case.tokens()[mine])]
        _rebind(case, spread, other)
        resized.append(spread(case.tokens()[mine]))
    waiting = spread(case.tokens()[mine])
    refused = refusal_of(lambda: _rebind(case, spread, placements(case)[0]))
    del waiting
    return Moved(logits, state, sent, refused, resized)


def _rebind(case: Case, spread: ExpertParallelModel, placement: Placement) -> int:
    """Move all layers to a placement: the rows that this rank sent to others."""
    per_node = len(case.slots) // case.nodes
    parameters = [[id(one) for one in block.parameters()] for block in spread.blocks]
    places = [
        LayerPlacement.of(placement, layer, devices_per_node=per_node, group=None)
        for layer in range(len(spread.blocks))
    ]
    with mock.patch.object(Route, "start", autospec=True, side_effect=Route.start) as start:
        rebind(list(zip(spread.blocks, places, strict=True)))
    assert [[id(one) for one in block.parameters()] for block in spread.blocks] == parameters
    return sum(call.args[0].crossing for call in start.call_args_list if call.args[1].ndim > 1)


def _backward(case: Case, model: nn.Module, tokens: Tensor, mine: slice) -> Tensor:
    logits: Tensor = model(tokens[mine])
    (logits * case.upstream()[mine]).sum().backward()  # type: ignore[no-untyped-call]
    return logits.detach()


def _average(spread: ExpertParallelModel) -> None:
    """Average the gradients of all but experts over ranks, as a synchronising backward pass would."""
    experts = {parameter for block in spread.blocks for parameter in block.parameters()}
    for parameter in spread.parameters():
        if parameter not in experts:
            assert parameter.grad is not None
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= torch.distributed.get_world_size()
