"""Training loops in DistributedDataParallel and FSDP2 with spread experts, against the same loop in one process.

State dicts of single ranks are loaded where they were saved and refused under another placement.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moeplan.errors import MismatchError
from moeplan.profilers.world import run_world
from moeplan.runtime import parallelize
from tests.runtime.loop_cases import Trained, alone, together
from tests.runtime.rank_cases import Case

CASES = {
    "even": Case("standard", (4, 4), (2, 3), seed=1, gradients=True),
    "replicas": Case("standard", (6, 7), (2, 2), seed=2, gradients=True, rule="even"),
    "a device without slots": Case("standard", (0, 8), (2, 2), seed=3, gradients=True),
}
WORK = [(name, "ddp", 1.0) for name in CASES] + [("even", "fsdp", 1.0), ("replicas", "fsdp", 1.0), ("even", "ddp", 1e9)]


SAVED = Case("standard", (4, 4), (2, 3), seed=1)
OTHER = replace(SAVED, seed=2)
ON_ONE = replace(SAVED, slots=(0, 8))
Reloaded = tuple[bool, bool, str]
Left = tuple[list[list[Trained]], list[Reloaded]]


@pytest.fixture(scope="module")
def left() -> Left:
    """What each loop left, by rank; and what became of states of single ranks, by rank."""
    work = [(CASES[name], max_norm, wrapper) for name, wrapper, max_norm in WORK]
    by_rank = run_world(2, every, work, timeout_s=60)
    assert by_rank is not None
    loops, reloaded = zip(*by_rank, strict=True)
    return [list(ranks) for ranks in zip(*loops, strict=True)], list(reloaded)


@pytest.fixture(scope="module")
def trained(left: Left) -> list[list[Trained]]:
    return left[0]


def every(world: Any, work: list[tuple[Case, float, str]]) -> tuple[list[Trained], Reloaded]:
    return [together(world, one) for one in work], reload()


def reload() -> Reloaded:
    """Whether a rank's own state fills an empty model, with experts and without, and what it is told elsewhere."""
    saved = parallelize(SAVED.model(), SAVED.plan()).model.state_dict()
    try:
        parallelize(SAVED.model(), OTHER.plan()).model.load_state_dict(saved)
    except MismatchError as error:
        return fills(SAVED), fills(ON_ONE), str(error)
    return fills(SAVED), fills(ON_ONE), "accepted"


def fills(case: Case) -> bool:
    """Whether a state goes into a model of other weights."""
    saved = parallelize(case.model(), case.plan()).model.state_dict()
    model = parallelize(OTHER.model(), case.plan()).model
    model.load_state_dict(saved)
    return all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())


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


def test_the_state_of_one_rank_is_loaded_under_its_own_placement_only(left: Left) -> None:
    for rank, (filled, filled_on_one, told) in enumerate(left[1]):
        saved, here = (", ".join(map(str, case.placement().held(0, rank))) for case in (SAVED, OTHER))
        assert saved != here
        assert filled
        assert filled_on_one
        assert told.startswith(
            f"layers.0.moe.experts: the state is of experts {saved}, this rank holds {here}; it was saved by"
        )
