"""Mixed precision, low precision and torch.compile around a parallelized model, on two ranks."""

from typing import Any

import pytest
import torch

from moeplan.profilers.world import World, run_world
from moeplan.runtime import parallelize
from tests.runtime.rank_cases import Case

CASE = Case("standard", (5, 5), (2, 2), gradients=True, rule="even", seed=40, forward=(2, 2, 2), dtype=torch.float32)


def run_precisions(world: World, _payload: None) -> dict[str, tuple[float, str, str]]:
    """By kind: the largest difference of logits from one process's over their largest, the dtypes of logits and
    gradients.
    """
    tokens = CASE.tokens()[2 * world.rank : 2 * world.rank + 2]
    return {kind: _compared(kind, tokens) for kind in ("autocast", "bfloat16", "compiled", "checkpointed")}


def _compared(kind: str, tokens: torch.Tensor) -> tuple[float, str, str]:
    whole = CASE.model()
    spread = parallelize(CASE.model(), CASE.plan())
    models: list[Any] = [whole, spread]
    if kind == "bfloat16":
        models = [model.bfloat16() for model in models]
    if kind == "compiled":
        models[1] = torch.compile(spread, backend="eager")
    if kind == "checkpointed":
        for layer in spread.model.layers:  # type: ignore[union-attr]
            layer.forward = _checkpointed(layer.forward)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        expected, found = (model(tokens) for model in models)
    found.float().sum().backward()
    gradient = spread.blocks[0].local.w_in.grad
    difference = (found - expected).abs().max() / expected.abs().max()
    return float(difference), str(found.dtype), str(None if gradient is None else gradient.dtype)


def _checkpointed(forward: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


@pytest.fixture(scope="module")
def precisions() -> list[dict[str, tuple[float, str, str]]]:
    by_rank = run_world(2, run_precisions, timeout_s=120)
    assert by_rank is not None
    return by_rank


@pytest.mark.parametrize(
    ("kind", "tolerance", "dtype", "gradient"),
    [
        ("autocast", 3e-2, "torch.bfloat16", "torch.float32"),
        ("bfloat16", 3e-2, "torch.bfloat16", "torch.bfloat16"),
        ("compiled", 1e-5, "torch.float32", "torch.float32"),
        ("checkpointed", 1e-5, "torch.float32", "torch.float32"),
    ],
)
def test_logits_and_types_are_those_of_one_process(
    kind: str, tolerance: float, dtype: str, gradient: str, precisions: list[dict[str, tuple[float, str, str]]]
) -> None:
    for answers in precisions:
        difference, found, trained = answers[kind]
        assert difference < tolerance
        assert (found, trained) == (dtype, gradient)
