"""The emulated model, its waits, and the layer by hand."""

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.emulated_cluster.model import STRIDE, EmulatedModel, Sizes, Waiter
from benchmarks.emulated_cluster.overhead import two_all_to_alls
from moeplan.profilers.world import World, run_world


class Scaling(nn.Module):
    """Expert e multiplies by its factor, and counts what it was asked for."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.factors = torch.tensor(factors)

    def forward(self, x_TM: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
        return (x_TM[:, None] * (weight_TK * self.factors[ids_TK])[..., None]).sum(1)


def by_hand(world: World, _payload: Any) -> float:
    """The largest difference between the layer by hand and the same sum in one process."""
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(7, 5, generator=generator)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(7)])
    weight = torch.rand(7, 2, generator=generator)
    factors = [1.0, 10.0, 100.0, 1000.0]
    found = two_all_to_alls(Scaling(factors[2 * world.rank :][:2]), 4, x, ids, weight)
    dist.barrier()
    return float((found - Scaling(factors)(x, ids, weight)).abs().max())


def test_the_layer_by_hand_is_the_weighted_sum_of_experts() -> None:
    found = run_world(2, by_hand)
    assert found is not None
    assert max(found) < 1e-3


def test_kinds_choose_their_experts_in_every_layer_and_predict_what_follows() -> None:
    ids = np.random.default_rng(0).integers(4, size=(300, 3, 2))
    model = EmulatedModel(ids, Sizes(num_experts=4, hidden_size=32, start_s=0.0, pair_s=0.0, attention_s=0.0))
    asked: list[Tensor] = []
    for layer in range(3):
        model.get_submodule(f"layers.{layer}.moe.experts").register_forward_pre_hook(
            lambda _module, args: asked.append(args[1])
        )
    tokens = torch.tensor([[0, 299, 255], [256, 7, 131]])
    logits = model(tokens)
    assert torch.equal(torch.stack(asked), torch.as_tensor(ids[tokens.flatten()]).transpose(0, 1))
    assert torch.equal(logits.argmax(-1), (tokens + STRIDE) % 300)
    logits.sum().backward()
    assert model.embed.shift.grad is not None


def test_what_oversleeps_is_taken_off_the_next_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds + 1e-4))
    waiter = Waiter()
    for _ in range(200):
        waiter.wait(5e-4)
    assert now[0] == pytest.approx(0.1, abs=2e-4)  # 0.12 were nothing taken off
