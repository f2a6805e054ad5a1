"""Training loops in DistributedDataParallel and FSDP2 with spread experts, against the same loop in one process."""

from typing import Any

import pytest
from torch import Tensor

from moeplan.profilers.world import run_world
from tests.runtime.loop_cases import Trained, alone, together
from tests.runtime.rank_cases import Case

CASES = {
    "even": Case("standard", (4, 4), (2, 3), seed=1, gradients=True),
    "replicas": Case("standard", (6, 7), (2, 2), seed=2, gradients=True, rule="even"),
    "a device without slots": Case("standard", (0, 8), (2, 2), seed=3, gradients=True),
}
WORK = [(name, "ddp", 1.0) for name in CASES] + [("even", "fsdp", 1.0), ("replicas", "fsdp", 1.0), ("even", "ddp", 1e9)]


@pytest.fixture(scope="module")
def trained() -> list[list[Trained]]:
    """What each loop left, by rank."""
    work = [(CASES[name], max_norm, wrapper) for name, wrapper, max_norm in WORK]
    by_rank = run_world(2, every, work, timeout_s=60)
    assert by_rank is not None
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def every(world: Any, work: list[tuple[Case, float, str]]) -> list[Trained]:
    return [together(world, one) for one in work]


def close(found: Tensor, expected: Tensor) -> bool:
    """Up to rounding, which Adam's division by small gradients makes larger."""
    return found.shape == expected.shape and bool(
        (found - expected).abs().max() <= 1e-9 * expected.abs().max().clamp_min(1e-300)
    )


@pytest.mark.parametrize("index", range(len(WORK)), ids=map(str, WORK))
def test_a_loop_over_spread_experts_is_that_of_one_process(index: int, trained: list[list[Trained]]) -> None:
    name, _, max_norm = WORK[index]
    expected, (found, other) = alone(CASES[name], max_norm), trained[index]
    assert found.norms == other.norms == pytest.approx(expected.norms, rel=1e-10)
    assert list(found.state) == list(expected.state)
    assert all(close(found.state[key], value) for key, value in expected.state.items())
    assert not other.state
    assert not other.optimizer


@pytest.mark.parametrize("index", range(len(WORK)), ids=map(str, WORK))
def test_the_whole_state_of_the_optimizer_is_that_of_one_process(index: int, trained: list[list[Trained]]) -> None:
    expected, found = alone(CASES[WORK[index][0]], WORK[index][2]).optimizer, trained[index][0].optimizer
    assert found["param_groups"] == expected["param_groups"]
    assert list(found["state"]) == list(expected["state"])
    for number, state in expected["state"].items():
        assert set(found["state"][number]) == set(state)
        assert all(close(found["state"][number][name], value) for name, value in state.items())
