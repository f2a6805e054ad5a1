"""What the ranks of a test world run, and the case that says it; imported by spawned processes too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from moeplan.errors import UsageError
from moeplan.planner.demo.model import ModelConfig, MoELanguageModel
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import ChunkShares, PipelineDecision
from moeplan.runtime.engine.traffic import Traffic
from moeplan.runtime.expert_parallel import ExpertParallelModel
from moeplan.runtime.plan import Plan
from moeplan.solvers.placement import Placement
from tests.runtime.plans import made_plan, random_placement
from tests.runtime.worlds import own, refusal_of


@dataclass(frozen=True)
class Case:
    """A forward of a random model under a random placement."""

    dispatch: str
    slots: tuple[int, ...]
    batches: tuple[int, ...]
    nodes: int = 1
    links: tuple[str, ...] = ()
    top_k: int = 2
    rule: str = "nearest"
    length: int = 7
    dtype: torch.dtype = torch.float64
    gradients: bool = False
    default_samples: bool = False
    seed: int = 0
    num_experts: int = 8
    num_layers: int = 3
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] | None = None
    shares: ChunkShares | None = None
    capacity_factor: float | None = None
    share_of_gradients: Literal["mean", "sum"] = "sum"

    @property
    def config(self) -> ModelConfig:
        sizes = {"hidden_size": 16, "ffn_size": 12, "num_heads": 4, "num_kv_heads": 2, "max_positions": 32}
        return ModelConfig(
            vocab_size=50, num_layers=self.num_layers, num_experts=self.num_experts, top_k=self.top_k, **sizes
        )

    @property
    def num_routed(self) -> int:
        """Layers with experts."""
        return self.num_layers

    def model(self) -> MoELanguageModel:
        torch.manual_seed(self.seed)
        return MoELanguageModel(self.config).to(self.dtype).train(self.gradients)

    def placement(self) -> Placement:
        """Random experts on every device, each at least once, no two replicas on a device."""
        return random_placement(self.num_routed, self.num_experts, self.slots, rule=self.rule, seed=self.seed)

    def plan(self, **decisions: Any) -> Plan:
        if self.forward:
            decisions["pipeline"] = PipelineDecision(
                forward=self.forward, backward=self.backward, shares=self.shares, capacity_factor=self.capacity_factor
            )
        cluster = Cluster(self.nodes, len(self.slots) // self.nodes).linked(self.links)
        spec = replace(self.config.spec(), layer_ids=tuple(range(self.num_routed)))
        return made_plan(cluster, spec, self.placement(), seed=self.seed, **decisions)

    def tokens(self, step: int = 0) -> torch.Tensor:
        """The tokens of all ranks, `[I, S]`."""
        generator = torch.Generator().manual_seed(self.seed + step)
        return torch.randint(50, (sum(self.batches), self.length), generator=generator)

    def upstream(self) -> torch.Tensor:
        """A fixed gradient of the loss by the logits, `[I, S, V]`."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(sum(self.batches), self.length, 50, generator=generator).to(self.dtype)

    def samples(self, step: int = 0) -> torch.Tensor:
        """Global sample ids `[I]`."""
        if self.default_samples:
            return torch.tensor([rank << 40 | i for rank, batch in enumerate(self.batches) for i in range(batch)])
        return 5 + 3 * torch.arange(sum(self.batches)) + 1000 * step


@dataclass
class Answer:
    """What a rank has after a case."""

    logits: np.ndarray
    traffic: Any
    routed: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    num_parameters: int = 0
    owned: list[list[int]] = field(default_factory=list)  #: Experts by layer whose parameters are here


def run_pair(world: World, cases: Sequence[Case]) -> tuple[list[Answer], dict[str, str]]:
    """The answers of this rank of two, and what it was told when it asked for what cannot be."""
    return run_cases(world, cases), {name: refusal_of(attempt) for name, attempt in _attempts(world.rank).items()}


def _attempts(rank: int) -> dict[str, Callable[[], object]]:
    case = Case("standard", (4, 4), (1, 1))
    plan, whole = case.plan(), case.model()

    def attempt(model: torch.nn.Module = whole, plan: Plan = plan, dispatch: Any = "standard") -> Callable[[], object]:
        return lambda: parallelize(model, plan, dispatch=dispatch)

    migrating = plan.model_copy(update={"options": {"placement": {"dispatch_model": "migrating"}}})
    return {
        "world size": attempt(plan=replace(case, slots=(2, 2, 2, 2)).plan()),
        "layers": attempt(replace(case, num_layers=2).model()),
        "experts": attempt(replace(case, num_experts=16).model()),
        "top-k": attempt(replace(case, top_k=3).model()),
        "hidden size": attempt(MoELanguageModel(replace(case.config, hidden_size=32))),
        "no sample policy": attempt(plan=made_plan(plan.cluster, plan.model), dispatch="migrating"),
        "degrees in coherent": attempt(plan=replace(case, forward=(2, 2, 2)).plan(), dispatch="coherent"),
        "other plan on rank 1": attempt(plan=replace(case, seed=rank).plan()),
        "other dispatch on rank 1": attempt(dispatch=("standard", "coherent")[rank]),
        "wrong model on rank 1": attempt(whole if rank == 0 else replace(case, num_layers=2).model()),
        "migrating": attempt(plan=migrating, dispatch=None),
        "not such a model": attempt(torch.nn.Linear(2, 2)),
        "parallelized before": attempt(parallelize(case.model(), plan).model),
        "unchanged": lambda: _check_whole(whole, case),
        "coherent training": lambda: parallelize(whole.train(), plan, dispatch="coherent")(case.tokens()[:1]),
    }


def _check_whole(model: MoELanguageModel, case: Case) -> None:
    shapes = [tuple(p.shape) for name, p in model.named_parameters() if name.endswith("experts.w_in")]
    assert shapes == [(8, 12, 16)] * case.num_layers
    raise UsageError("whole")


def run_cases(world: World, cases: Sequence[Case]) -> list[Answer]:
    """The answers of this rank, one a case."""
    return [answer(world.rank, case) for case in cases]


def answer(rank: int, case: Case) -> Answer:
    """The answer of a rank; all ranks call it together."""
    mine = own(case.batches, rank)
    model = parallelize(case.model(), case.plan(), dispatch=case.dispatch, gradients=case.share_of_gradients)  # type: ignore[arg-type]
    samples = None if case.default_samples else case.samples()[mine]
    with torch.set_grad_enabled(case.gradients):
        logits = model(case.tokens()[mine], samples)
    if case.gradients:
        (logits * case.upstream()[mine]).sum().backward()
    return Answer(
        logits=logits.detach().numpy(),
        traffic=model.traffic,
        routed=[(r.sample.numpy(), r.position.numpy(), r.ids.numpy()) for r in model.routed],
        gradients={
            name.replace("experts.local", "experts"): p.grad.numpy()
            for name, p in model.model.named_parameters()
            if p.grad is not None
        },
        num_parameters=sum(p.numel() for p in model.parameters()),
        owned=[block.owned for block in model.blocks],
    )


Run = tuple[np.ndarray, dict[str, np.ndarray], Traffic]


def passed(model: ExpertParallelModel, case: Case, rank: int, between: Callable[[], object] = lambda: None) -> Run:
    """Logits, gradients and traffic of a step, with something done before its backward pass; ranks call it together."""
    mine = own(case.batches, rank)
    logits = model(case.tokens()[mine], case.samples()[mine])
    traffic = model.traffic
    between()
    (logits * case.upstream()[mine]).sum().backward()
    gradients = {
        name.replace("experts.local", "experts"): p.grad.double().numpy()
        for name, p in model.model.named_parameters()
        if p.grad is not None
    }
    return logits.detach().double().numpy(), gradients, traffic


def same(one: Run, other: Run) -> bool:
    """Whether outputs, gradients and traffic are equal to the bit."""
    equal = one[1].keys() == other[1].keys() and one[2] == other[2]
    pairs = [(one[0], other[0]), *((one[1][name], other[1][name]) for name in other[1])]
    return equal and len(pairs) > 10 and all(np.array_equal(*pair) for pair in pairs)
