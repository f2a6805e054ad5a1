"""What the ranks of a generating test world run, and the case that says it; imported by spawned processes too."""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from moeplan.profilers.cluster import Cluster
from moeplan.profilers.exchanged import Exchange
from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.dispatch.coherent import CoherentDispatch
from moeplan.runtime.dispatch.dispatch import Batch
from moeplan.runtime.dispatch.migrating import MigratingDispatch
from moeplan.runtime.engine.gather import Count, Gather
from moeplan.runtime.models.huggingface import view
from moeplan.runtime.plan import Plan
from moeplan.solvers.placement import Placement
from moeplan.traces.model import ModelSpec
from tests.runtime.models.huggingface_models import make_model
from tests.runtime.plans import made_plan
from tests.runtime.rank_cases import Case
from tests.runtime.worlds import refusal_of

Family = Literal["embedded", "mixtral", "qwen3_moe", "olmoe", "gpt_oss"]
NUM_EXPERTS = 8
COLLECTIVES = ("all_to_all_single", "all_gather_single", "all_gather_into_tensor", "all_gather_object", "all_reduce")


@dataclass(frozen=True)
class Job:
    """Prompts of these lengths on each rank, continued by a random model under a random placement."""

    dispatch: Literal["standard", "coherent"]
    family: Family
    slots: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    new: int = 6
    eos: int | None = None
    top_k: int = 2
    nodes: int = 1
    rule: str = "nearest"
    seed: int = 0

    @property
    def lengths(self) -> list[int]:
        return [length for ours in self.prompts for length in ours]

    @property
    def source(self) -> list[int]:
        """The rank of each sample."""
        return [rank for rank, ours in enumerate(self.prompts) for _ in ours]

    @property
    def hidden_size(self) -> int:
        return 16 if self.family == "embedded" else 32

    def case(self) -> Case:
        return Case(
            self.dispatch,
            self.slots,
            (),
            nodes=self.nodes,
            top_k=self.top_k,
            rule=self.rule,
            seed=self.seed,
            num_layers=2 if self.family == "qwen3_moe" else 3,
        )

    def placement(self) -> Placement:
        return self.case().placement()

    def model(self) -> nn.Module:
        if self.family == "embedded":
            return self.case().model()
        name = "num_local_experts" if self.family in ("mixtral", "gpt_oss") else "num_experts"
        return make_model(
            self.family, seed=self.seed, **{name: NUM_EXPERTS, "num_experts_per_tok": self.top_k, "vocab_size": 50}
        )

    def plan(self) -> Plan:
        layers, size = self.case().num_layers, len(self.slots)
        return made_plan(
            Cluster(self.nodes, size // self.nodes),
            ModelSpec(
                name="random",
                layer_ids=tuple(range(layers)),
                num_experts=NUM_EXPERTS,
                top_k=self.top_k,
                hidden_size=self.hidden_size,
            ),
            self.placement(),
            seed=self.seed,
        )

    def tokens(self) -> list[torch.Tensor]:
        """The prompts of all ranks."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randint(50, (length,), generator=generator) for length in self.lengths]

    def samples(self) -> torch.Tensor:
        """Their global ids."""
        return 5 + 3 * torch.arange(len(self.lengths))


@dataclass
class Reply:
    """What a rank has after a job."""

    tokens: list[list[int]]
    traffic: Any
    cache_bytes: int
    calls: Counter[str]
    logits: list[np.ndarray]


def run_jobs(world: World, jobs: Sequence[Job]) -> list[Reply]:
    """The replies of this rank, one a job."""
    return [_run(world.rank, job) for job in jobs]


def _run(rank: int, job: Job) -> Reply:
    mine = [place for place, source in enumerate(job.source) if source == rank]
    prompts, samples = [job.tokens()[place] for place in mine], job.samples()[mine]
    model = parallelize(job.model(), job.plan(), dispatch=job.dispatch)
    with _counted() as calls:
        tokens = model.generate(prompts, job.new, job.eos, samples)
    traffic, cache_bytes = model.traffic, model.cache_bytes
    logits = _forward(job, model.model, prompts, samples) if job.dispatch == "coherent" else []
    return Reply([one.tolist() for one in tokens], traffic, cache_bytes, calls, logits)


def _forward(job: Job, model: nn.Module, prompts: list[torch.Tensor], samples: torch.Tensor) -> list[np.ndarray]:
    """The logits of the prompts from one coherent forward, padded on the left."""
    width = max([len(prompt) for prompt in prompts], default=4)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        mask[row, width - len(prompt) :] = True
        tokens[row, width - len(prompt) :] = prompt
    logits = CoherentDispatch.of(job.plan(), None).forward(model, Batch(tokens, samples, mask), None).logits
    assert not logits[~mask].any()
    return [sample_logits[real].numpy() for sample_logits, real in zip(logits, mask, strict=True)]


@contextlib.contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count the calls of collectives."""
    calls = Counter[str]()
    with contextlib.ExitStack() as stack:
        collectives = [(dist, name) for name in COLLECTIVES if hasattr(dist, name)]
        for where, name in [(Exchange, "start"), (Exchange, "gather"), *collectives]:
            spy = mock.patch.object(where, name, wraps=getattr(where, name))
            stack.callback(lambda name, spied: calls.update({name: spied.call_count}), name, stack.enter_context(spy))
        gather: Any = Exchange.gather
        stack.callback(lambda: calls.update(f"of {one.args[3]} a node" for one in gather.call_args_list))
        yield calls


@dataclass
class Pair:
    """What a rank of two has: what it was told when it asked for what cannot be, uneven gathers, events."""

    refusals: dict[str, str]
    gathered: list[list[int]]
    events: list[str]


def run_two(world: World, job: Job) -> Pair:
    """What this rank of two has."""
    gathered = [_gathered(world.rank, num_rows, group) for num_rows in (0, 1, 3) for group in (None, 1, 2)]
    return Pair(_refusals(world.rank, replace(job, dispatch="standard")), gathered, _events(job))


def _gathered(rank: int, num_rows: int, devices_per_node: int | None) -> list[int]:
    """What is gathered where rank 0 has `num_rows` rows and rank 1 has one less than twice that, or none."""
    mine = [num_rows, max(0, 2 * num_rows - 1)][rank]
    rows = 10 * rank + torch.arange(mine)[:, None]
    counts = Count.start(mine, torch.device("cpu"), None).wait()
    kinds = rows.double().repeat(1, 3), rows.int()
    wide, narrow = Gather.start(counts, None, *kinds, devices_per_node=devices_per_node).wait()
    assert (wide == narrow).all()
    gathered: list[int] = narrow.flatten().tolist()
    return gathered


def _events(job: Job) -> list[str]:
    """What happens in turn in a generation: "sent" and "arrived" of keys and values, and calls of these modules."""
    model, events = parallelize(job.model(), job.plan(), dispatch="coherent"), list[str]()

    def noted(event: str, call: Any) -> Any:
        def called(*args: Any, **more: Any) -> Any:
            events.append(event)
            return call(*args, **more)

        return called

    seen: Any = view(model.model)
    for name, module in (("head", seen.head), ("embed", seen.embed), ("norm", seen.layers[0].attention_norm)):
        module.register_forward_hook(noted(name, lambda *_, **__: None))
    sent, arrived = noted("sent", Gather.start), noted("arrived", Gather.wait)
    with mock.patch.object(Gather, "start", sent), mock.patch.object(Gather, "wait", arrived):
        model.generate([torch.arange(3)], job.new)
    return events


def _refusals(rank: int, job: Job) -> dict[str, str]:
    model = parallelize(job.model(), job.plan(), dispatch=job.dispatch)
    good = [torch.arange(3)]
    attempts: dict[str, tuple[Any, ...]] = {
        "no new token": (good, 0),
        "an empty prompt on rank 1": ([torch.arange(3 - 3 * rank)], 4),
        "floats on rank 0": ([torch.zeros(3) if rank == 0 else torch.arange(3)], 4),
        "a token beyond the vocabulary on rank 1": ([torch.tensor([3, 10_000 * rank])], 4),
        "two dimensions": ([torch.zeros(2, 2, dtype=torch.int64)], 4),
        "too few sample ids": (good, 4, None, torch.arange(2)),
        "other lengths": (good, 4 + rank),
        "other ends": (good, 4, rank),
    }
    refusals = {name: refusal_of(functools.partial(model.generate, *given)) for name, given in attempts.items()}
    model.model.train()
    refusals["training"] = refusal_of(lambda: model.generate(good, 4))
    model.dispatcher = MigratingDispatch(mock.Mock())
    return refusals | {"migrating": refusal_of(lambda: model.generate(good, 4))}
