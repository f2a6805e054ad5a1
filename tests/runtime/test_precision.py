"""Mixed precision, low precision, torch.compile and checkpointing around a parallelized model, on two ranks."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moeplan.profilers.world import World, run_world
from moeplan.runtime import parallelize
from tests.runtime.rank_cases import Case

CASE = Case("standard", (5, 5), (2, 2), gradients=True, rule="even", seed=40, forward=(2, 2, 2), dtype=torch.float32)
ON_ONE = replace(CASE, slots=(8, 0), seed=41)
KINDS = {
    "autocast": CASE,
    "bfloat16": CASE,
    "compiled": CASE,
    "checkpointed": CASE,
    "checkpointed, experts on one rank": ON_ONE,
}


@dataclass(frozen=True)
class Compared:
    """The largest differences from one process over what is largest there, and the dtypes of logits and gradients."""

    logits: float
    experts: float
    routers: float
    dtypes: tuple[str, str]


def run_precisions(world: World, _payload: None) -> dict[str, Compared]:
    """By kind."""
    return {kind: _compared(kind, case, world.rank) for kind, case in KINDS.items()}


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
        expected, found = models[0](tokens), models[1](tokens[mine])
    for logits, upstream in ((expected, case.upstream()), (found, case.upstream()[mine])):
        (logits.float() * upstream).sum().backward()
    own, held = _gradients(spread.model), [block.held for block in spread.blocks]
    experts, routers = list[float](), list[float]()
    for name, gradient in _gradients(whole).items():
        if ".experts.w_in" in name:
            mine_only = own[name.replace("experts", "experts.local")]
            experts.append(_off(mine_only, gradient[held[len(experts)]], gradient))
        elif ".router." in name:
            dist.all_reduce(own[name])
            routers.append(_off(own[name], gradient, gradient))
    dtypes = str(found.dtype), str(next(spread.blocks[0].local.parameters()).grad.dtype)  # type: ignore[union-attr]
    return Compared(_off(found, expected[mine], expected), max(experts), max(routers), dtypes)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _off(found: Tensor, expected: Tensor, whole: Tensor) -> float:
    assert found.shape == expected.shape
    if not found.numel():
        return 0.0
    return float((found - expected).abs().max() / whole.abs().max())


def _checkpointed(forward: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


@pytest.fixture(scope="module")
def precisions() -> list[dict[str, Compared]]:
    by_rank = run_world(2, run_precisions, timeout_s=120)
    assert by_rank is not None
    return by_rank


@pytest.mark.parametrize(
    ("kind", "tolerance", "dtypes"),
    [
        ("autocast", 3e-2, ("torch.bfloat16", "torch.float32")),
        ("bfloat16", 3e-2, ("torch.bfloat16", "torch.bfloat16")),
        ("compiled", 1e-5, ("torch.float32", "torch.float32")),
        ("checkpointed", 1e-5, ("torch.float32", "torch.float32")),
        ("checkpointed, experts on one rank", 1e-5, ("torch.float32", "torch.float32")),
    ],
)
def test_logits_gradients_and_types_are_those_of_one_process(
    kind: str, tolerance: float, dtypes: tuple[str, str], precisions: list[dict[str, Compared]]
) -> None:
    for answers in precisions:
        found = answers[kind]
        assert max(found.logits, found.experts, found.routers) < tolerance, found
        assert found.dtypes == dtypes
