import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.solvers.placement import Placement, keeps_groups_whole


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
        ([0, 1, 3, 2, 4, 5, 6, 7], [3, 5], 4),  # a group on two devices
    ],
)
def test_blocks_of_whole_groups_are_whole(row: list[int], slots: list[int], num_groups: int) -> None:
    assert keeps_groups_whole(placed([list(range(8)), row], slots), num_groups)


@pytest.mark.parametrize(
    ("row", "slots", "num_groups"),
    [
        ([1, 2, 4, 5, 0, 3, 6, 7], [4, 4], 4),  # groups split
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


@settings(max_examples=100)
@given(st.data())
def test_whole_are_exactly_the_orders_in_which_routing_limited_to_groups_chooses_the_same_experts(
    data: st.DataObject,
) -> None:
    num_groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    num_experts = num_groups * size
    groups = data.draw(st.permutations(range(num_groups)))
    order = np.concatenate([data.draw(st.permutations(range(g * size, (g + 1) * size))) for g in groups])
    if num_experts > 1 and data.draw(st.booleans()):
        i, j = data.draw(st.lists(st.integers(0, num_experts - 1), min_size=2, max_size=2, unique=True))
        order[[i, j]] = order[[j, i]]
    # Routing sees a group by its experts' scores: that a pair shares a group is seen where these two alone score.
    scores = [np.isin(np.arange(num_experts), pair) * 1.0 for pair in np.ndindex(num_experts, num_experts)]
    same = all(
        score.reshape(num_groups, -1).sum(axis=1).max() == score[order].reshape(num_groups, -1).sum(axis=1).max()
        for score in scores
    )
    assert keeps_groups_whole(placed([order.tolist()], [1] * num_experts, num_experts), num_groups) == same
