"""Steps of a parallelized model on two ranks, in any precision, compiled or run again, and what they leave behind."""

import copy
import gc
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moeplan.profilers.stopwatch import stopwatch
from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.engine.traffic import Traffic
from moeplan.runtime.engine.watch import watch
from moeplan.runtime.expert_parallel import ExpertParallelModel
from moeplan.runtime.gradients import clip_grad_norm_
from tests.runtime.rank_cases import Case
from tests.runtime.worlds import Alive, by_rank, own, refusal_of

CASE = Case("standard", (5, 5), (2, 2), gradients=True, rule="even", seed=40, forward=(2, 2, 2), dtype=torch.float32)
EMPTY = Case("standard", (8, 0), (2, 2), gradients=True, seed=40, forward=(2, 2, 2), top_k=1)
REPLICAS = Case("standard", (6, 6), (2, 2), gradients=True, seed=9, rule="even")
ON_ONE = replace(CASE, slots=(8, 0), seed=41)
WIDE, NARROW = "torch.float32", "torch.bfloat16"
KINDS = {  # the case, how near is equal, and the dtypes of logits and gradients
    "autocast": (CASE, 3e-2, (NARROW, WIDE)),
    "bfloat16": (CASE, 3e-2, (NARROW, NARROW)),
    "compiled": (CASE, 1e-5, (WIDE, WIDE)),
    "checkpointed": (CASE, 1e-5, (WIDE, WIDE)),
    "checkpointed, experts on one rank": (ON_ONE, 1e-5, (WIDE, WIDE)),
}


@dataclass(frozen=True)
class Compared:
    """The largest differences from one process over what is largest there, and the dtypes of logits and gradients."""

    logits: float
    experts: float
    routers: float
    dtypes: tuple[str, str]


Variants = tuple[dict[str, Compared], list[Any]]


def run_variants(world: World, _payload: None) -> Variants:
    """Differences by kind, and what blocks that run again have."""
    return {kind: _compared(kind, case, world.rank) for kind, (case, *_) in KINDS.items()}, _again(world)


def _compared(kind: str, case: Case, rank: int) -> Compared:
    whole, tokens, mine = case.model(), case.tokens(), slice(2 * rank, 2 * rank + 2)
    spread = parallelize(case.model(), case.plan(), gradients="sum")
    models: list[Any] = [whole, spread]
    if kind == "bfloat16":
        models = [model.bfloat16() for model in models]
    if kind == "compiled":
        models[1] = torch.compile(spread, backend="eager")
    if kind.startswith("checkpointed"):
        for layer in spread.model.layers:  # type: ignore[union-attr]
            layer.forward = _checkpointed(layer.forward)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        expected, actual = models[0](tokens), models[1](tokens[mine])
    for logits, upstream in ((expected, case.upstream()), (actual, case.upstream()[mine])):
        (logits.float() * upstream).sum().backward()
    own, owned = _gradients(spread.model), [block.owned for block in spread.blocks]
    experts, routers = list[float](), list[float]()
    for name, gradient in _gradients(whole).items():
        if ".experts.w_in" in name:
            mine_only = own[name.replace("experts", "experts.local")]
            experts.append(_off(mine_only, gradient[owned[len(experts)]], gradient))
        elif ".router." in name:
            dist.all_reduce(own[name])
            routers.append(_off(own[name], gradient, gradient))
    dtypes = str(actual.dtype), str(next(spread.blocks[0].local.parameters()).grad.dtype)  # type: ignore[union-attr]
    return Compared(_off(actual, expected[mine], expected), max(experts), max(routers), dtypes)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _off(actual: Tensor, expected: Tensor, whole: Tensor) -> float:
    assert actual.shape == expected.shape
    if not actual.numel():
        return 0.0
    return float((actual - expected).abs().max() / whole.abs().max())


def _checkpointed(forward: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def _again(world: World) -> list[Any]:
    """Whether gradients agree, the laps of a rank without experts, and what two open forwards are told."""
    mine = slice(2 * world.rank, 2 * world.rank + 2)
    gradients = [_gradients_of(EMPTY, mine, again=again) for again in (False, True)]
    agree = [torch.allclose(one, other, rtol=1e-12) for one, other in zip(*gradients, strict=True)]
    with stopwatch() as laps:
        parallelize(EMPTY.model(), EMPTY.plan())(EMPTY.tokens()[mine])
    return [len(agree), all(agree), {part: len(times) for part, times in laps.items()}, _told(mine), _traffic(mine)]


def _gradients_of(case: Case, mine: slice, *, again: bool) -> list[torch.Tensor]:
    model = parallelize(case.model(), case.plan())
    if again:
        _checkpoint(model)
    model(case.tokens()[mine]).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _traffic(mine: slice) -> list[Traffic]:
    """Of the later of two forwards, before and after the blocks of both have run again."""
    model, tokens = parallelize(EMPTY.model(), EMPTY.plan()), EMPTY.tokens()[mine]
    _checkpoint(model)
    both = model(tokens).square().sum() + model(tokens[:, :2]).square().sum()
    before = model.traffic
    both.backward()
    return [before, model.traffic]


def _checkpoint(model: ExpertParallelModel) -> None:
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.moe.forward = _checkpointed(layer.moe.forward)


def _told(mine: slice) -> str:
    model, tokens = parallelize(REPLICAS.model(), REPLICAS.plan()), REPLICAS.tokens()[mine]
    copy.deepcopy(model)
    _checkpoint(model)
    for _ in range(2):  # forwards whose backward has run, or never will, are no others
        model(tokens).square().sum().backward()
        model(tokens)
    both = model(tokens).square().sum() + model(tokens[:, :4]).square().sum()
    return refusal_of(both.backward)


@pytest.fixture(scope="module")
def variants() -> list[Variants]:
    return by_rank(2, run_variants)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_gradients_and_types_are_those_of_one_process(kind: str, variants: list[Variants]) -> None:
    _, tolerance, dtypes = KINDS[kind]
    for answers, _ in variants:
        compared = answers[kind]
        assert max(compared.logits, compared.experts, compared.routers) < tolerance, compared
        assert compared.dtypes == dtypes


def test_gradients_of_blocks_that_run_again_are_the_same_and_other_turns_are_refused(variants: list[Variants]) -> None:
    for _, (count, agree, laps, refusal, (before, after)) in variants:
        assert sum(before.loads) > 0 or before.copies > 0
        assert before == after
        assert count > 10
        assert agree
        assert laps == {"dispatch": 9, "experts": 6, "combine": 9}  # of 3 layers: counts, two chunks; two chunks, sum
        assert "two checkpointed forwards before one backward under a placement with replicas" in refusal


WARM_UP, STEPS = 4, 16
CASES = {
    "standard": Case("standard", (5, 5), (4, 4), num_layers=1, gradients=True, length=8),
    "pipelined": Case("standard", (5, 5), (4, 4), num_layers=1, gradients=True, length=8, forward=(2,), backward=(4,)),
    "coherent": Case("coherent", (5, 5), (4, 4), num_layers=1, length=8),
}


@dataclass(frozen=True)
class Left:
    """Bytes of tensors and Python objects that half of the steps left; threads before, after, without the watch."""

    tensor_bytes: int
    objects: int
    threads: tuple[int, int, int]


def stepped(world: World, cases: list[Case]) -> list[Left]:
    return [_left(world, case) for case in cases]


def _left(world: World, case: Case) -> Left:
    spread = parallelize(case.model(), case.plan(), dispatch=case.dispatch)  # type: ignore[arg-type]
    loop = DistributedDataParallel(spread) if case.gradients else spread
    optimizer = torch.optim.AdamW(loop.parameters(), lr=0.0)  # routing, and so what is kept of it, stays
    tokens = case.tokens()[own(case.batches, world.rank)]

    def step() -> tuple[int, int]:
        with torch.set_grad_enabled(case.gradients):
            logits = loop(tokens)
        if case.gradients:
            logits.square().mean().backward()
            clip_grad_norm_(loop, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        return alive.now, len(gc.get_objects())

    with Alive() as alive:
        for _ in range(WARM_UP):
            step()
        gc.freeze()
        threads = lasting_threads()
        held = np.array([step() for _ in range(STEPS)])
        after = lasting_threads()
    # Other threads hold some for a while, and let them go.
    tensor_bytes, objects = held[STEPS // 2 :].min(axis=0) - held[: STEPS // 2].min(axis=0)
    dist.barrier()  # the watch of a rank ends with that of rank 0
    watch().close()
    return Left(int(tensor_bytes), int(objects), (threads, after, lasting_threads()))


def lasting_threads() -> int:
    """How many threads there are, besides that of exchanges, which comes and goes."""
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("moeplan-exchanges") <= 1, names
    return len(names) - names.count("moeplan-exchanges")


@pytest.fixture(scope="module")
def left() -> list[list[Left]]:
    """By rank, then case."""
    return by_rank(2, stepped, list(CASES.values()))


@pytest.mark.parametrize("index", range(len(CASES)), ids=CASES)
def test_steps_leave_no_memory_and_no_thread_behind(index: int, left: list[list[Left]]) -> None:
    for rank in left:
        assert rank[index].tensor_bytes <= 0, left
        assert rank[index].objects < STEPS // 2, left
        started, after, without_watch = rank[index].threads
        assert after == started == without_watch + 3, left
