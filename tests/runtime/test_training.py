"""Training under plans, with DistributedDataParallel around the rest, equals training in one process."""

from dataclasses import replace

import numpy as np
import pytest

from moeplan.profilers.world import run_world
from tests.runtime.migrating import migrating_cases
from tests.runtime.migrating.migrating_reference import trained
from tests.runtime.rank_cases import Case
from tests.runtime.training_cases import in_one_process, run_training

FOUR = Case("standard", (2, 2, 2, 2), (2, 2, 2, 2), gradients=True, seed=30)
CASES = {
    "a placement, top-1": replace(FOUR, top_k=1, seed=31),
    "replicas": replace(FOUR, slots=(3, 3, 3, 3), nodes=2, rule="even", seed=32),
    "degrees": replace(FOUR, forward=(2, 1, 4), backward=(1, 3, 2), seed=34),
    "degrees over replicas": replace(FOUR, slots=(3, 3, 3, 3), rule="even", top_k=4, forward=(2, 2, 2), seed=35),
}
MOVING = migrating_cases.Case(
    steps=20, slots=(3, 3, 3, 3), rule="even", padding="right", degrees=2, top_k=3, method="even", seed=37
)
EIGHT = replace(FOUR, slots=(1,) * 8, batches=(1,) * 8, nodes=2, forward=(2, 2, 2), seed=36)


@pytest.fixture(scope="module")
def losses() -> dict[str, list[float]]:
    by_rank = run_world(4, run_training, [*CASES.values(), MOVING], timeout_s=120)
    assert by_rank is not None
    return dict(zip([*CASES, "moving"], by_rank[0], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_losses_of_twenty_steps_equal_those_of_one_process(name: str, losses: dict[str, list[float]]) -> None:
    _check(CASES[name], losses[name])


def test_losses_under_a_sample_policy_replicas_and_degrees_equal_those_of_one_process(
    losses: dict[str, list[float]],
) -> None:
    expected = [loss / len(MOVING.slots) for loss in trained(MOVING, share=1 / len(MOVING.slots))]
    np.testing.assert_allclose(losses["moving"], expected, rtol=1e-9)
    assert expected[-1] < 0.95 * expected[0]


def test_eight_ranks_train_as_one_process_does() -> None:
    by_rank = run_world(8, run_training, [EIGHT], timeout_s=120)
    assert by_rank is not None
    _check(EIGHT, by_rank[0][0])


def _check(case: Case, found: list[float]) -> None:
    expected = in_one_process(case)
    assert expected.gap > 1e-8  # no near tie that rounding could turn
    np.testing.assert_allclose(found, expected.losses, rtol=1e-9)
    assert np.mean(found[-5:]) < np.mean(found[:5])
