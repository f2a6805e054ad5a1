"""Training loops on the ranks of a test world, and the same loop in one process."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.gradients import clip_grad_norm_, expert_parameters
from moeplan.runtime.whole import full_optimizer_state, full_state_dict, keep_held
from tests.runtime.rank_cases import Case

STEPS = 4
RELOADED_BEFORE = 2


@dataclass
class Trained:
    """What a loop leaves: the norm before each step, the whole model and the whole state of its optimizer."""

    norms: list[float]
    state: dict[str, Tensor]
    optimizer: dict[str, Any]


def alone(case: Case, max_norm: float) -> Trained:
    """The loop in one process; its loss is the mean of the ranks'."""
    model, norms = case.model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        (model(case.tokens()) * case.upstream()).sum().div(len(case.slots)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(norms, model.state_dict(), optimizer.state_dict())


def together(world: World, work: tuple[Case, float, str]) -> Trained:
    """The loop on ranks, in "ddp", saved and loaded into another model between, or "fsdp"; what only rank 0 has."""
    case, max_norm, wrapper = work
    mine = slice(sum(case.batches[: world.rank]), sum(case.batches[: world.rank + 1]))
    model, optimizer = _made(case, wrapper)
    norms = []
    for step in range(STEPS):
        if wrapper == "ddp" and step == RELOADED_BEFORE:
            model, optimizer = _reloaded(case, model, optimizer)
        (model(case.tokens()[mine], case.samples()[mine]) * case.upstream()[mine]).sum().backward()
        norms.append(clip_grad_norm_(model, max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(norms, full_state_dict(model), full_optimizer_state(model, optimizer))


def _made(case: Case, wrapper: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = parallelize(case.model(), case.plan(), dispatch="standard")
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, ignored_params=set(expert_parameters(model)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _reloaded(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Another model under another placement, with what a checkpoint on rank 0 held."""
    saved = [full_state_dict(model), full_optimizer_state(model, optimizer)]
    dist.broadcast_object_list(saved)
    model, optimizer = _made(replace(case, seed=case.seed + 1), "ddp")
    inner: Any = model.module
    inner.model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    keep_held(model, optimizer)
    return model, optimizer
