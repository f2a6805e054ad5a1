"""What bounds steps that are split exactly, against all sets of experts."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.planner.evaluate.split_bounds import split_bounds
from moeplan.solvers.placement import Placement

HELD = [[[0, 1], [0, 2], [1, 3], [4, 2]], [[0, 1, 2], [3, 4], [0, 3], []]]
PLACEMENTS = [Placement.from_sets([held], 5) for held in HELD]


@settings(max_examples=60)
@given(
    loads=st.lists(st.lists(st.integers(0, 60), min_size=5, max_size=5), min_size=1, max_size=5),
    which=st.integers(0, 1),
)
def test_a_layer_s_bound_is_that_of_its_worst_set_of_experts(loads: list[list[int]], which: int) -> None:
    held, steps = HELD[which], [one for one in loads if any(one)]
    bounds = split_bounds(np.array(loads)[:, None], PLACEMENTS[which])
    if not steps:
        assert bounds == []
        return
    (bound,) = bounds
    sets = [set(one) for n in range(1, 6) for one in itertools.combinations(range(5), n)]
    on = {frozenset(one): sum(bool(one & {*of}) for of in held) for one in sets}
    alive, worst = sum(map(bool, held)), []
    for total in steps:
        most = max(-(-sum(total[e] for e in one) // on[frozenset(one)]) for one in sets)
        worst.append(most * alive / sum(total))
    assert bound.split == pytest.approx(np.mean(worst))
    assert bound.even >= bound.split - alive / min(map(sum, steps))  # which is of whole pairs
    assert bound.at_mean + bound.often <= 1 + 1e-9
    if bound.experts:
        assert bound.devices == on[frozenset(bound.experts)]
        assert any(
            -(-sum(total[e] for e in bound.experts) // bound.devices) * alive / sum(total) == pytest.approx(ratio)
            for total, ratio in zip(steps, worst, strict=True)
        )
