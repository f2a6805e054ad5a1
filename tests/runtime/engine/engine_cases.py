"""What four ranks find of the engine's layer, in one world for all its tests."""

import functools
import time
from dataclasses import dataclass

import numpy as np
import torch

from moeplan.planner.demo.model import Experts
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.world import World
from moeplan.runtime.engine.chunks import Chunks
from moeplan.runtime.engine.layer import ParallelExperts
from moeplan.runtime.engine.layer_placement import LayerPlacement
from moeplan.runtime.engine.stopwatch import lap, stopwatch
from moeplan.solvers import contiguous
from tests.runtime.engine.alive import Alive
from tests.runtime.engine.plain import PlainLayer
from tests.runtime.engine.rebind_cases import Moved, moved
from tests.runtime.rank_cases import Case
from tests.runtime.worlds import by_rank

CASE = Case("standard", (3, 2, 2, 2), (0, 0, 0, 0), top_k=2, rule="even", seed=3, num_layers=1)
TOKENS = (9, 4, 0, 6)
DEGREES = [(1, 1), (2, 2), (4, 1), (2, 3)]
NUM_TOKENS, NUM_EXPERTS, HIDDEN, FFN = 512, 8, 256, 64
TOP_KS = (1, 2, 4)


@dataclass(frozen=True)
class Found:
    """What a rank finds: outputs and gradients by x for each of `DEGREES`, peaks for each of `TOP_KS`, a late lap, and
    what it has of experts that change places, by case.
    """

    buffers: list[tuple[np.ndarray, np.ndarray]]
    peaks: list[list[int]]
    lap_s: float
    moved: list[Moved]


@functools.cache
def found_by_four() -> list[Found]:
    """By rank."""
    return by_rank(4, _find)


def _find(world: World, _payload: None) -> Found:
    return Found(
        buffers=[_buffers(world.rank, *degrees) for degrees in DEGREES],
        peaks=[_peaks(world.rank, top_k) for top_k in TOP_KS],
        lap_s=_late(world),
        moved=moved(world),
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
    held = placement.physical_to_logical[0, placement.device_of_slot == rank].tolist()
    whole.w_in, whole.w_out = (torch.nn.Parameter(p.detach()[held]) for p in (whole.w_in, whole.w_out))
    chunks = Chunks.of([1 / forward] * forward, [1 / backward] * backward, capacity_factor=1.0)
    here = LayerPlacement.of(placement, 0, devices_per_node=4, group=None)
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
