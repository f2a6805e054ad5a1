"""What two ranks of a generating test world run beside their jobs; imported by spawned processes too."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.dispatch.migrating import MigratingDispatch
from moeplan.runtime.engine.gather import Count, Gather
from moeplan.runtime.models.huggingface import view
from tests.runtime.coherent.generation_cases import Job, Reply, run_jobs
from tests.runtime.worlds import told


@dataclass
class Pair:
    """What a rank of two has: replies, what it was told when it asked for what cannot be, uneven gathers, events."""

    replies: list[Reply]
    refusals: dict[str, str]
    gathered: list[list[int]]
    events: list[str]


def run_two(world: World, jobs: Sequence[Job]) -> Pair:
    """What this rank of two has."""
    gathered = [_gathered(world.rank, num_rows) for num_rows in (0, 1, 3)]
    return Pair(run_jobs(world, jobs), _refusals(world.rank, jobs[0]), gathered, _events(jobs[-1]))


def _gathered(rank: int, num_rows: int) -> list[int]:
    """What is gathered where rank 0 has `num_rows` rows and rank 1 has one less than twice that, or none."""
    mine = [num_rows, max(0, 2 * num_rows - 1)][rank]
    rows = 10 * rank + torch.arange(mine)[:, None]
    counts = Count.start(mine, torch.device("cpu"), None).wait()
    wide, narrow = Gather.start(counts, None, rows.double().repeat(1, 3), rows.int()).wait()
    assert (wide == narrow).all()
    found: list[int] = narrow.flatten().tolist()
    return found


def _events(job: Job) -> list[str]:
    """What happens in turn in a generation: "sent" and "arrived" of keys and values, and calls of these modules."""
    model, events = parallelize(job.model(), job.plan(), dispatch="coherent"), list[str]()

    def noted(event: str, call: Any) -> Any:
        def called(*args: Any) -> Any:
            events.append(event)
            return call(*args)

        return called

    seen: Any = view(model.model)
    for name, module in (("head", seen.head), ("embed", seen.embed), ("norm", seen.layers[0].attention_norm)):
        module.register_forward_hook(noted(name, lambda *_: None))
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
    refusals = {name: told(functools.partial(model.generate, *given)) for name, given in attempts.items()}
    model.model.train()
    refusals["training"] = told(lambda: model.generate(good, 4))
    model.dispatcher = MigratingDispatch(mock.Mock())
    return refusals | {"migrating": told(lambda: model.generate(good, 4))}
