"""Groups smaller than the world, device meshes, and FSDP2 layer by layer: right, or refused in one line."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moeplan.profilers.world import run_world
from tests.runtime.group_cases import FOUR, PAIR, in_groups

DRIFT = "gradients averaged over 4 ranks beside experts trained by a group of 2, which would drift"
IN_PARTS = "of a model of which fully_shard keeps parameters in parts"


@pytest.fixture(scope="module")
def ranks() -> list[tuple[dict[str, str], dict[str, Tensor]]]:
    found: list[Any] | None = run_world(4, in_groups, timeout_s=120)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("attempt", "told"),
    [
        ("two dimensions", "a device mesh [2, 2] ['dp', 'ep'] as group; expected one dimension; name one: group=mesh["),
        ("one dimension", "accepted"),
        ("ddp over the world", DRIFT),
        ("ddp over the world, the model within", DRIFT),
        ("ddp over the world, frozen", "accepted"),
        ("ddp over the world, inference", "accepted"),
        ("ddp over the group", "accepted"),
        ("fsdp over the world", DRIFT),
        ("fsdp over the group", "accepted"),
        ("coherent, layer by layer", f"coherent dispatch {IN_PARTS}"),
        ("coherent, the whole", "accepted"),
        ("generation, not told", f"generation {IN_PARTS}"),
        ("generation, told", "accepted"),
    ],
)
def test_what_would_go_wrong_in_a_group_is_refused_on_every_rank_and_nothing_else(
    attempt: str, told: str, ranks: list[tuple[dict[str, str], dict[str, Tensor]]]
) -> None:
    for refusals, _ in ranks:
        assert refusals[attempt].startswith(told)
        assert "\n" not in refusals[attempt]


@pytest.mark.parametrize("name", ["one dimension", "inference"])
def test_each_group_gives_what_one_process_gives(
    name: str, ranks: list[tuple[dict[str, str], dict[str, Tensor]]]
) -> None:
    expected = PAIR.model()(PAIR.tokens()).detach()
    for rank, (_, left) in enumerate(ranks):
        torch.testing.assert_close(left[name], expected[[rank % 2]])


def test_the_whole_model_sharded_gives_what_one_process_gives(
    ranks: list[tuple[dict[str, str], dict[str, Tensor]]],
) -> None:
    expected = FOUR.model()(FOUR.tokens())
    for rank, (_, left) in enumerate(ranks):
        torch.testing.assert_close(left["coherent"], expected[[rank]].detach())
        assert left["generated"][0] == expected[rank, -1].argmax()
