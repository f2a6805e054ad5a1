"""Twenty steps of training that the ranks of a test world make, and the single process they are held against."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
from torch import nn
from torch.nn.functional import cross_entropy

from moeplan.planner.demo.model import Router
from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from tests.runtime.migrating import migrating_cases
from tests.runtime.rank_cases import Case

STEPS = 20


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


def run_training(world: World, cases: Sequence[Case | migrating_cases.Case]) -> list[list[float]]:
    """The mean loss over ranks of every step, one list a case."""
    return [
        [_mean(world, loss) for loss in (_losses(world, case) if isinstance(case, Case) else _moving(world, case))]
        for case in cases
    ]


def _losses(world: World, case: Case) -> Iterator[torch.Tensor]:
    mine = slice(sum(case.batches[: world.rank]), sum(case.batches[: world.rank + 1]))
    model = nn.parallel.DistributedDataParallel(parallelize(case.model(), case.plan()))
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        yield _stepped(optimizer, loss_of(model, batch(case, step)[mine]))


def _moving(world: World, case: migrating_cases.Case) -> Iterator[torch.Tensor]:
    """Under a sample policy, by public calls alone."""
    mine = slice(sum(case.batches[: world.rank]), sum(case.batches[: world.rank + 1]))
    spread = parallelize(case.model(), case.plan())
    model, optimizer = nn.parallel.DistributedDataParallel(spread), optimizer_of(spread)
    for step in range(case.steps):
        tokens, mask = case.tokens(step)[mine], case.mask()[mine]
        logits = model(tokens, case.samples(step)[mine], mask)
        loss = migrating_cases.loss_of(logits, spread.follow(tokens), spread.follow(mask))
        yield _stepped(optimizer, loss)


def _stepped(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    return loss.detach().clone()


def _mean(world: World, loss: torch.Tensor) -> float:
    torch.distributed.all_reduce(loss)
    return loss.item() / world.size
