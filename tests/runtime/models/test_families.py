"""Mixtral, Qwen3-MoE, OLMoE and gpt-oss over two ranks equal themselves in one process."""

import functools

import numpy as np
import pytest

from moeplan.profilers.world import run_world
from tests.runtime.models.family_cases import Family, Outcome, run_families

NAMES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
CASES = [
    *(Family(name) for name in NAMES),
    *(Family(name, degrees=(2, 3), sets=((0, 1, 2, 4), (1, 3, 4, 5))) for name in NAMES),
    *(Family(name, dispatch="coherent", top_k=1, sets=((0, 1, 2, 3), (4, 5))) for name in NAMES),
]
each = pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])


@pytest.fixture(scope="module")
def outcomes() -> list[list[Outcome]]:
    by_rank = run_world(2, run_families, CASES, timeout_s=120)
    assert by_rank is not None
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


@functools.cache
def reference(case: Family) -> Outcome:
    model = case.model()
    logits = model(case.tokens()).logits
    (logits * case.upstream()).sum().backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(logits.detach().numpy(), gradients)


@each
def test_logits_equal_those_of_one_process(index: int, outcomes: list[list[Outcome]]) -> None:
    found = np.concatenate([outcome.logits for outcome in outcomes[index]])
    expected = reference(CASES[index]).logits
    assert np.abs(found - expected).max() <= 1e-12 * np.abs(expected).max()


@pytest.mark.parametrize("index", [i for i, case in enumerate(CASES) if case.dispatch == "standard"])
def test_gradients_equal_those_of_one_process(index: int, outcomes: list[list[Outcome]]) -> None:
    case = CASES[index]
    table = case.plan().placement
    assert table is not None
    layers: dict[str, int] = {}
    for name, expected in reference(case).gradients.items():
        if ".experts." not in name:
            found = sum(outcome.gradients[name] for outcome in outcomes[index])
        else:
            layer = layers.setdefault(name.split(".experts.")[0], len(layers))
            found = np.zeros_like(expected)
            for rank, outcome in enumerate(outcomes[index]):
                found[table.physical_to_logical[layer, table.device_of_slot == rank]] = outcome.gradients[name]
        assert np.abs(found - expected).max() <= 1e-12 * np.abs(expected).max()
