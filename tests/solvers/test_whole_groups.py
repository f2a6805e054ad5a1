import numpy as np
import pytest

from moeplan.solvers.placement import Placement
from moeplan.solvers.whole_groups import keeps_groups_whole


def placed(rows: list[list[int]], slots: list[int], num_experts: int = 8) -> Placement:
    return Placement(np.array(rows, dtype=np.int32), np.array(slots), num_experts)


@pytest.mark.parametrize(
    ("row", "slots", "num_groups"),
    [
        ([2, 3, 6, 7, 0, 1, 4, 5], [4, 4], 4),  # two groups a device
        ([5, 7, 4, 6, 1, 2, 0, 3], [2, 2, 2, 2], 2),  # two devices a group
        ([6, 7, 0, 1, 2, 3, 4, 5], [2, 6], 4),  # devices of unequal slots
        ([0, 1, 2, 3, 4, 5, 6, 7], [4, 0, 4], 2),  # a dead one
        ([3, 0, 2, 1, 7, 4, 6, 5], [1] * 8, 2),
        ([0, 1, 2, 3, 4, 5, 6, 7], [8], 1),
    ],
)
def test_blocks_of_whole_groups_are_whole(row: list[int], slots: list[int], num_groups: int) -> None:
    assert keeps_groups_whole(placed([list(range(8)), row], slots), num_groups)


@pytest.mark.parametrize(
    ("row", "slots", "num_groups"),
    [
        ([1, 2, 4, 5, 0, 3, 6, 7], [4, 4], 4),  # groups split
        ([0, 1, 3, 2, 4, 5, 6, 7], [3, 5], 4),  # a block straddles the devices
        ([4, 5, 0, 6, 1, 2, 3, 7], [2, 2, 2, 2], 2),
        ([0, 1, 2, 3, 4, 5, 6, 7, 0, 1], [5, 5], 4),  # replicas
        ([0, 1, 2, 3, 4, 5, 6, 7], [4, 4], 3),  # groups of no equal size
    ],
)
def test_anything_else_is_not(row: list[int], slots: list[int], num_groups: int) -> None:
    row = [e for held in np.split(row, np.cumsum(slots)[:-1]) for e in sorted(held.tolist())]
    assert not keeps_groups_whole(placed([row], slots), num_groups)


def test_every_layer_counts() -> None:
    whole, split = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 3, 5, 6, 7]
    assert keeps_groups_whole(placed([whole, whole], [4, 4]), 2)
    assert not keeps_groups_whole(placed([whole, split], [4, 4]), 2)
