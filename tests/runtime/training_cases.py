"""Fifty steps of training that the ranks of a test world make, and the single process they are held against."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from moeplan.planner.demo.model import Router
from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from tests.runtime.rank_cases import Case

STEPS = 50


@dataclass(frozen=True)
class Losses:
    """The loss of each step, and the smallest gap between the k-th and the next gate of any token."""

    losses: list[float]
    gap: float


def batch(case: Case, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * case.seed + step % 5)
    return torch.randint(50, (sum(case.batches), case.length + 1), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def in_one_process(case: Case) -> Losses:
    """Trained on whole batches."""
    model, gaps = case.model(), []

    def watch(router: nn.Module, inputs: tuple[torch.Tensor, ...], _output: object) -> None:
        assert isinstance(router, Router)
        top = router.gate(inputs[0]).detach().topk(case.top_k + 1).values
        gaps.append(float((top[:, -2] - top[:, -1]).min()))

    for router in model.routers:
        router.register_forward_hook(watch)
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(case, step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return Losses(losses, min(gaps))


def run_training(world: World, cases: Sequence[Case]) -> list[list[float]]:
    """The mean loss over ranks of every step, one list a case."""
    return [_trained(world, case) for case in cases]


def _trained(world: World, case: Case) -> list[float]:
    mine = slice(sum(case.batches[: world.rank]), sum(case.batches[: world.rank + 1]))
    model = nn.parallel.DistributedDataParallel(parallelize(case.model(), case.plan()))
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(case, step)[mine])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / world.size)
    return losses
