"""What the ranks of a test world run under a sample policy, and the case that says it; imported by them, too."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from moeplan.planner.demo.model import Attention, Layer, MoELanguageModel, Router
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import PipelineDecision, SamplePolicyDecision
from moeplan.runtime.dispatch.dispatch import Batch
from moeplan.runtime.dispatch.migrating import MigratingDispatch
from moeplan.runtime.engine.experts import routed_blocks
from moeplan.runtime.migrating.homes import SamplePolicy
from moeplan.runtime.migrating.predictor import Predictor
from moeplan.runtime.plan import Plan
from moeplan.solvers.luffy import Law
from tests.runtime.models.huggingface_models import make_model
from tests.runtime.plans import made_plan
from tests.runtime.rank_cases import Case
from tests.runtime.worlds import own, refusal_of

EXPERTS, VOCABULARY = 8, 50
LINKS = ("intra=0.1:2", "inter=0.01:5")
LAW = Law(1e-6, 1e-6, 1e-8, start_s=2e-6)


class SigmoidRouter(Router):
    """Gate weights that do not sum to 1."""

    def forward(self, x_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top_TK, ids_TK = self.gate(x_TM).topk(self.top_k, dim=-1)
        return top_TK.sigmoid(), ids_TK


class Dropping(Attention):
    """Values are dropped at random."""

    dropout = 0.3

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().attend(q, k, functional.dropout(v.contiguous(), self.dropout), mask)


@dataclass(frozen=True)
class Moving(Case):
    """A random model under a random placement and a sample policy."""

    dispatch: str = "migrating"
    slots: tuple[int, ...] = (2, 2, 2, 2)
    batches: tuple[int, ...] = (2, 3, 1, 2)
    nodes: int = 2
    gradients: bool = True
    method: str = "sum"
    law: Law | None = None
    layers: tuple[int, ...] = (0, 1, 2)
    predicted: bool = False
    padding: str = ""  # "right", "left" or "holes"
    window: int | None = None
    dense: int | None = None
    dropping: bool = False
    steps: int = 0

    @property
    def num_routed(self) -> int:
        return self.num_layers - (self.dense is not None)

    def model(self) -> MoELanguageModel:
        model = super().model()
        for ordinal, layer in enumerate(cast("list[Layer]", model.layers)):
            layer.moe.router.__class__ = SigmoidRouter
            layer.attention.window = self.window
            if self.dropping:
                layer.attention.__class__ = Dropping
            if ordinal == self.dense:
                layer.moe = nn.Linear(16, 16).double()  # type: ignore[assignment]
        return model

    def plan(self, **decisions: Any) -> Plan:
        policy = SamplePolicyDecision(method=self.method, layers=self.layers, attention=self.law)
        return super().plan(sample_policy=policy, **decisions)

    def policy(self) -> SamplePolicy:
        plan, predictor = self.plan(), None
        if self.predicted:
            shape = (self.num_routed - 1, EXPERTS, len(self.slots))
            predictor = Predictor(np.random.default_rng(self.seed).random(shape, np.float32))
        copy_bytes = plan.model.copy_bytes
        return SamplePolicy(self.method, frozenset(self.layers), predictor, plan.cluster, copy_bytes, self.law)

    def mask(self) -> torch.Tensor:
        """Where they are tokens, `[I, S]`; the last sample of several has none where there are holes."""
        generator = torch.Generator().manual_seed(self.seed)
        length = torch.randint(1, self.length + 1, (sum(self.batches), 1), generator=generator)
        place = torch.arange(self.length)
        if self.padding == "holes":
            real = torch.rand(sum(self.batches), self.length, generator=generator) < 0.6
            real[-1] = False
            return real
        return {"": place >= 0 * length, "right": place < length, "left": place >= self.length - length}[self.padding]


@dataclass
class Moved:
    """What a rank has after a case; rows are of the samples that ended here."""

    logits: np.ndarray
    samples: np.ndarray
    followed: list[np.ndarray]
    routed: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    gradients: dict[str, np.ndarray]
    traffic: Any


@dataclass
class Answers:
    """What a rank of a world has: answers by case, then family; of training; and what it was told of what cannot be."""

    moved: list[Moved]
    losses: list[float]
    weighed: list[float]  #: By `loss_scale` of mean losses, samples of unequal number and length
    refusals: list[str]


def run_cases(world: World, work: tuple[Sequence[Moving], Sequence[str], Moving | None]) -> Answers:
    """What this rank has of cases, families and, in training, of another case."""
    cases, families, training = work
    moved = [_moved(world.rank, case) for case in cases] + [_family(world.rank, family) for family in families]
    if training is None:
        return Answers(moved, [], [], [])
    free = free_of(training)
    return Answers(moved, _trained(world, training), _trained(world, free, weighed=True), _refusals(world))


def _moved(rank: int, case: Moving) -> Moved:
    mine = own(case.batches, rank)
    model, dispatch = parallelize(case.model(), case.plan(), gradients="sum"), MigratingDispatch(case.policy())
    tokens, samples, mask, upstream = case.tokens(), case.samples(), case.mask(), case.upstream()
    given = mask[mine] if case.padding else None
    torch.manual_seed(case.seed)
    result = dispatch.forward(model.model, Batch(tokens[mine], samples[mine], given), None)
    torch.autograd.backward((result.logits * dispatch.follow(upstream[mine])).sum())
    return Moved(
        logits=result.logits.detach().numpy(),
        samples=dispatch.follow(samples[mine]).numpy(),
        followed=[dispatch.follow(kind[mine]).numpy() for kind in (tokens, mask, upstream[:, 0, 0].half())],
        routed=[(r.sample.numpy(), r.position.numpy(), r.ids.numpy()) for r in (b.routed for b in model.blocks)],
        gradients=_gradients(model.model),
        traffic=result.traffic,
    )


def _gradients(model: nn.Module) -> dict[str, np.ndarray]:
    """Of every weight, summed over ranks but for the experts, whose rows are as they lie here."""
    named = dict(model.named_parameters())
    assert not [name for name, parameter in named.items() if parameter.grad is None]
    shared = [cast("torch.Tensor", parameter.grad) for name, parameter in named.items() if ".experts." not in name]
    whole = nn.utils.parameters_to_vector(shared)
    dist.all_reduce(whole)
    nn.utils.vector_to_parameters(whole, shared)
    return {
        re.sub(r"\.experts\.\w+\.", ".experts.", name): cast("torch.Tensor", parameter.grad).numpy().copy()
        for name, parameter in named.items()
    }


def loss_of(logits_BSV: torch.Tensor, tokens_BS: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
    """The sum over tokens of the cross entropy of each by its own logits' neighbour class."""
    labels = (tokens_BS * 7 + 3) % VOCABULARY
    return functional.cross_entropy(logits_BSV[mask_BS], labels[mask_BS], reduction="sum") / 50


def free_of(case: Moving) -> Moving:
    """The case with lengths of up to 17 tokens, and homes that give ranks unequal numbers of samples."""
    law = replace(LAW, numbers="free")
    return replace(case, method="joint", law=law, links=LINKS, batches=(1, 4, 2, 3), length=17, steps=5)


def _trained(world: World, case: Moving, *, weighed: bool = False) -> list[float]:
    """The mean loss over ranks of every step, by public calls alone; `weighed`: of means over a rank's tokens."""
    mine, losses = own(case.batches, world.rank), []
    spread = parallelize(case.model(), case.plan())
    model, optimizer = DistributedDataParallel(spread), torch.optim.AdamW(spread.parameters(), lr=3e-3)
    for step in range(case.steps):
        tokens, mask = case.tokens(step)[mine], case.mask()[mine]
        optimizer.zero_grad()
        logits = model(tokens, case.samples(step)[mine], mask)
        here = spread.follow(mask)
        loss = loss_of(logits, spread.follow(tokens), here)
        if weighed:
            loss = loss / max(int(here.sum()), 1) * spread.loss_scale
        torch.autograd.backward(loss)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world.size)
    return losses


def family_model(family: str) -> nn.Module:
    return make_model(family, seed=3)


def family_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens and mask `[I, S]`, padded on both sides, and a gradient of the logits `[I, S, V]`."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(64, (7, 9), generator=generator)
    begin, end = torch.tensor([[0], [0], [2], [0], [3], [0], [1]]), torch.tensor([[9], [6], [9], [4], [9], [9], [9]])
    mask = (torch.arange(9) >= begin) & (torch.arange(9) < end)
    return tokens, mask, torch.randn(7, 9, 64, generator=generator).double() * mask[:, :, None]


def _family(rank: int, family: str) -> Moved:
    """The answer of a model of transformers, two of its seven samples on one rank, five on the other."""
    model, mine = family_model(family), own((2, 5), rank)
    layer_ids = tuple(range(len(routed_blocks(model))))
    spec = replace(Moving().config.spec(), num_experts=6, hidden_size=32, layer_ids=layer_ids)
    policy = SamplePolicyDecision(method="sum", layers=layer_ids)
    pipeline = PipelineDecision(forward=(2,) * len(layer_ids), backward=None)
    plan = made_plan(Cluster(2, 1), spec, sample_policy=policy, pipeline=pipeline)
    spread = parallelize(model, plan, gradients="sum")
    tokens, mask, upstream = (kind[mine] for kind in family_batch())
    logits = spread(tokens, torch.arange(7)[mine], mask)
    torch.autograd.backward((logits * spread.follow(upstream)).sum())
    samples = spread.follow(torch.arange(7)[mine]).numpy()
    held = [np.array(block.owned) for block in spread.blocks]
    return Moved(logits.detach().numpy(), samples, held, [], _gradients(model), spread.traffic)


def _refusals(world: World) -> list[str]:
    case = Moving()
    model, tokens, samples = parallelize(case.model(), case.plan()), case.tokens()[:2], case.samples()[:2]
    model(tokens, samples)
    attempts: list[Callable[[], object]] = [
        lambda: model(tokens[:, : 4 + (world.rank == 2)], samples),
        lambda: model(tokens[:, :4], samples, torch.ones(2, 3)),
        lambda: model.follow(torch.zeros(3)),
    ]
    return [refusal_of(attempt) for attempt in attempts]
