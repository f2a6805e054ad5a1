"""What ranks find of plans carried out on a device; imported by spawned processes too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moeplan.planner.demo.model import Layer, Router
from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import CondensationDecision, PlacementDecision
from moeplan.runtime.expert_parallel import ExpertParallelModel
from moeplan.runtime.gradients import clip_grad_norm_
from moeplan.runtime.plan import Plan
from moeplan.runtime.rebalancing import tables_of
from tests.builders import known
from tests.runtime.migrating.migrating_cases import LAW, Moving
from tests.runtime.models.huggingface_models import make_model
from tests.runtime.plans import eager, made_plan
from tests.runtime.rank_cases import Case
from tests.runtime.rebalancing_cases import drawn
from tests.runtime.worlds import own

WIDE: dict[str, Any] = {"length": 12, "dtype": torch.bfloat16, "gradients": True}
DEGREES: dict[str, Any] = {"forward": (2, 3, 1), "backward": (1, 2, 4)}
STEPS = 6


class GivenRouter(Router):
    """Experts given by sample and position, few of them often, so that no rounding chooses others."""

    def forward(self, x_TM: Tensor) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng(0)
        rows = rng.choice(8, (512, 8), p=1 / np.arange(1, 9) / (1 / np.arange(1, 9)).sum())
        different = torch.tensor(np.array([list(dict.fromkeys([*row, *range(8)]))[: self.top_k] for row in rows]))
        experts: Any = self.block[0].experts  # type: ignore[index, union-attr]  # which were told what tokens these are
        ids_TK = different.to(x_TM.device)[(7 * experts.sample + experts.position) % len(different)]
        top_TK, order_TK = self.gate(x_TM).gather(1, ids_TK).sort(dim=1, descending=True)
        return top_TK.softmax(dim=-1), ids_TK.gather(1, order_TK)


@dataclass(frozen=True)
class Setting:
    """A plan of four devices or, by `alone`, of one; its case has weights that bfloat16 can hold."""

    case: Case
    condensation: dict[str, Any] | None = None
    rebalancing: str = ""  #: "policy" or "schedule"
    family: str = ""  #: Of transformers
    generates: bool = False

    @property
    def rounds(self) -> bool:
        """Whether rounding may choose other experts, or drop or condense other rows."""
        case = self.case
        return bool(self.family or self.condensation or case.capacity_factor or case.dispatch == "coherent")

    def alone(self) -> "Setting":
        """The same on one device, which has all experts and samples."""
        case = replace(self.case, slots=(8,), batches=(sum(self.case.batches),), nodes=1, links=())
        return replace(self, case=case)

    def model(self, dtype: torch.dtype, *, autocast: bool) -> nn.Module:
        """The model; in bfloat16 one of transformers takes its grouped product."""
        if not self.family:
            own = self.case.model().to(torch.float32 if autocast else dtype)
            for layer in cast("list[Layer]", own.layers if self.case.gradients else ()):
                layer.moe.router.__class__ = GivenRouter
                layer.moe.router.block = (layer.moe,)  # type: ignore[assignment]
            return own
        implementation: dict[str, Any] = {} if dtype == torch.float64 else {"experts_implementation": "grouped_mm"}
        model = make_model(self.family, num_local_experts=8, vocab_size=50, **implementation).bfloat16().to(dtype)
        return model.float() if autocast else model

    def plan(self) -> Plan:
        case, decided = self.case, dict[str, Any]()
        if self.condensation is not None:
            decided["condensation"] = CondensationDecision(**self.condensation)
        plan = case.plan(**decided)
        if self.family:
            spec = replace(plan.model, hidden_size=32)
            return made_plan(plan.cluster, spec, case.placement(), **decided)
        if not self.rebalancing:
            return plan
        start = PlacementDecision.of(case.placement())
        return made_plan(plan.cluster, plan.model, rebalancing=eager(start))

    def schedule(self) -> dict[int, np.ndarray] | None:
        if self.rebalancing != "schedule":
            return None
        shape, rng = tables_of(self.case.placement()).shape, np.random.default_rng(1)
        return {step: np.stack([drawn(shape[1:], rng) for _ in range(shape[0])]) for step in (0, 1, 3, 4)}


PLAIN = Case("standard", (2, 2, 2, 2), (3, 2, 2, 2), rule="even", seed=30, **WIDE)
FOLLOWED = Case("standard", (4, 4, 4, 4), (1, 1, 1, 1), rule="quota", seed=5, **WIDE)
COHERENT = replace(PLAIN, dispatch="coherent", gradients=False)
NETMOE = Moving(batches=(2, 3, 1, 2), seed=11, **WIDE)
SETTINGS = {
    "contiguous": Setting(PLAIN),
    "exflow, coherent": Setting(COHERENT, generates=True),
    "exflow, coherent, one expert a token": Setting(replace(COHERENT, top_k=1), generates=True),
    "eplb": Setting(replace(PLAIN, slots=(3, 4, 2, 3), nodes=2, rule="nearest"), generates=True),
    "eplb, quota": Setting(replace(PLAIN, slots=(3, 4, 2, 3), rule="quota")),
    "pipemoe": Setting(replace(PLAIN, **DEGREES)),
    "pipemoe, capacity": Setting(replace(PLAIN, **DEGREES, capacity_factor=1.0)),
    "netmoe": Setting(NETMOE),
    "luffy": Setting(replace(NETMOE, method="joint", law=LAW, links=("intra=0.1:2", "inter=0.01:5"), **DEGREES)),
    "flexmoe": Setting(FOLLOWED, rebalancing="policy"),
    "flexmoe, schedule": Setting(FOLLOWED, rebalancing="schedule"),
    "condensation": Setting(replace(PLAIN, length=20), {"tau": 0.3}),
    "condensation, medoid in chunks": Setting(replace(PLAIN, length=20, **DEGREES), {"tau": 0.3, "medoid": True}),
    "condensation, star": Setting(replace(PLAIN, length=20), {"criterion": "star", "threshold": 0.8}),
    "mixtral": Setting(PLAIN, family="mixtral"),
    "mixtral, coherent": Setting(COHERENT, family="mixtral", generates=True),
}
REPLICATED = ("eplb", "eplb, quota", "flexmoe, schedule", "condensation, medoid in chunks", "condensation, star")
ALONE = {name: setting.alone() for name, setting in SETTINGS.items() if name not in REPLICATED}


@dataclass
class Carried:
    """What a rank has of a setting."""

    logits: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norm: float = 0.0  #: Of all gradients
    losses: list[float] = field(default_factory=list)
    operations: list[Any] = field(default_factory=list)
    moved: int = 0
    generated: list[list[int]] = field(default_factory=list)
    traffic: Any = None


@dataclass(frozen=True)
class Work:
    """Settings, and how they are computed."""

    names: Sequence[str]
    dtype: torch.dtype = torch.float64
    autocast: bool = False
    device: str = "cpu"


def carried(world: World, work: Work) -> dict[str, Carried]:
    """What this rank has of each setting, by name."""
    settings = SETTINGS if world.size > 1 else ALONE
    return {name: _carried(world.rank, settings[name], work) for name in work.names}


def _carried(rank: int, setting: Setting, work: Work) -> Carried:
    case, mine = setting.case, own(setting.case.batches, rank)
    whole = setting.model(work.dtype, autocast=work.autocast).to(work.device).train(case.gradients)
    trains: Any = {"gradients": "mean" if setting.rebalancing else "sum", "dispatch": case.dispatch}
    model = parallelize(whole, setting.plan(), schedule=setting.schedule(), **trains)
    tokens, samples, upstream = (one[mine].to(work.device) for one in (case.tokens(), case.samples(), case.upstream()))

    def run(called: Any) -> Tensor:
        with torch.autocast(work.device.partition(":")[0], torch.bfloat16, enabled=work.autocast):
            logits: Tensor = called(tokens, samples)
        return logits

    if setting.rebalancing:
        return _trained(model, run, upstream)
    with torch.set_grad_enabled(case.gradients):
        logits = run(model)
    found = Carried(logits.detach().double().cpu(), traffic=model.traffic)
    if case.gradients:
        (logits * model.follow(upstream).to(logits.dtype)).sum().backward()  # type: ignore[no-untyped-call]
        named = model.model.named_parameters()
        found.gradients = {name: one.grad.double().cpu() for name, one in named if one.grad is not None}
        found.norm = float(clip_grad_norm_(model, float("inf")))
    if setting.generates:
        model.eval()
        found.generated = [new.tolist() for new in model.generate(tokens, 4)]
    return found


def _trained(model: ExpertParallelModel, run: Callable[[Any], Tensor], upstream: Tensor) -> Carried:
    """Steps of AdamW, with whose state experts move."""
    loop, losses, logits = DistributedDataParallel(model), list[float](), upstream
    optimizer = torch.optim.AdamW(loop.parameters(), 1e-2)
    for _ in range(STEPS):
        logits = run(loop)
        loss = (logits - upstream).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    done, exact = known(model.rebalancing), logits.detach().double().cpu()
    return Carried(exact, losses=losses, operations=done.operations, moved=done.moved, traffic=model.traffic)
