"""The memory of the layer beside that of the plain one: the most bytes of tensors alive at once."""

import weakref
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from moeplan.planner.demo.model import Experts
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.world import World, run_world
from moeplan.runtime.engine.chunks import Chunks
from moeplan.runtime.engine.layer import ParallelExperts
from moeplan.solvers import contiguous
from tests.runtime.engine.plain import PlainLayer

NUM_TOKENS, NUM_EXPERTS, HIDDEN, FFN = 512, 8, 256, 64


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations made and nobody has freed yet."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor.untyped_storage())
        return result

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak(layer: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> int:
    """The most bytes alive in a forward and a backward pass, beyond what was there."""
    with Alive() as alive:
        y = layer(x, ids, weight)
        (y * y).sum().backward()
    return int(alive.most)


def run_peaks(world: World, top_ks: tuple[int, ...]) -> list[list[int]]:
    """For every K the plain layer's peak, then ours in one chunk and in four."""
    return [_peaks(world, top_k) for top_k in top_ks]


def _peaks(world: World, top_k: int) -> list[int]:
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    weight, ids = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(top_k)
    placement = contiguous.solve(1, NUM_EXPERTS, Cluster(1, world.size)).placement

    def ours(degree: int) -> torch.nn.Module:
        chunks = Chunks.of([1 / degree] * degree, [1 / degree] * degree)
        experts = Experts(NUM_EXPERTS // world.size, HIDDEN, FFN)
        return ParallelExperts(experts, placement, 0, devices_per_node=world.size, group=None, chunks=chunks)

    layers = [PlainLayer(Experts(NUM_EXPERTS // world.size, HIDDEN, FFN), NUM_EXPERTS), ours(1), ours(4)]
    return [peak(layer, x.clone().requires_grad_(), ids, weight.clone().requires_grad_()) for layer in layers]


def test_the_tracker_sees_what_is_alive_at_once() -> None:
    with Alive() as alive:
        a = torch.zeros(1000)
        b = a + 1
        del a
        b = b * 2
    assert alive.most == 2 * 4000
    assert alive.now == 4000
    assert len(b) == 1000


def test_buffers_stay_within_one_and_a_half_of_the_plain_all_to_alls() -> None:
    by_rank = run_world(2, run_peaks, (1, 2, 4), timeout_s=60)
    assert by_rank is not None
    plain, *ours = np.moveaxis(np.array(by_rank), -1, 0)
    assert plain.min() > NUM_TOKENS * HIDDEN * 4
    assert (np.array(ours) <= 1.5 * plain).all()
