"""The rules quota and lp, token by token: loads of linear programmes, sources served as the split says, in turn."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import UsageError
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.solvers.quota import in_turn, split
from moeplan.solvers.replicas import ReplicaTable
from moeplan.solvers.step_split import StepSplit, layer_holders, split_loads
from tests.oracles.splits import least_load

GROUP, RATIO = 2, 8
HELD = [[[0, 1, 2], [0, 3, 4], [0, 1, 5], [2, 4, 5]], [[0, 1], [2, 3, 4, 5], [1, 2, 3], [4, 5, 0]]]
TOKENS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=200)


def placement_of(layer: int) -> Placement:
    return Placement.from_sets([HELD[layer]], 6, ReplicaRule.QUOTA)


def least(total: Any, layer: int) -> int:
    return least_load(placement_of(layer).holds(0), total)


@settings(max_examples=60)
@given(tokens=TOKENS, layer=st.integers(0, 1), rule=st.sampled_from(["quota", "lp"]), cut=st.integers(0, 200))
def test_a_step_is_split_as_well_as_can_be_whatever_parts_it_comes_in(
    tokens: Any, layer: int, rule: str, cut: int
) -> None:
    step, home, expert = np.array(tokens).T  # expert 6 is none: not routed
    pairs, routed = np.zeros((2, 1, 6, 4), np.int32), expert < 6
    np.add.at(pairs, (step[routed], 0, expert[routed], home[routed]), 1)
    placement = placement_of(layer)
    splits = StepSplit([layer_holders(placement, GROUP if rule == "quota" else 4)], rule, pairs, RATIO)
    parts = [slice(0, cut), slice(cut, None)]
    device = np.concatenate([splits.choose(0, expert[p, None], home[p], step[p]) for p in parts])[:, 0]
    assert (device[~routed] == -1).all()
    assert all(e in HELD[layer][d] for e, d in zip(expert[routed], device[routed], strict=True))
    (holders,) = layer_holders(placement, GROUP)
    for b in range(2):
        load = np.bincount(device[routed & (step == b)], minlength=4)
        assert load.max() == least(pairs[b, 0].sum(axis=1), layer)
        if rule == "quota":
            first, order = in_turn(split(pairs[b, 0].astype(np.int64), holders, RATIO)[0], holders)
            for e, g in np.ndindex(6, 4):
                taken = device[(expert == e) & (home == g) & (step == b)]
                assert taken.tolist() == order[first[e, g] : first[e, g] + len(taken)].tolist()


@settings(max_examples=60)
@given(
    loads=st.lists(st.lists(st.integers(0, 50), min_size=6, max_size=6), min_size=1, max_size=6), per=st.integers(1, 3)
)
def test_rows_of_a_step_are_split_as_the_whole_is(loads: Any, per: int) -> None:
    loads_ME, step_M = np.array(loads), np.arange(len(loads)) // per
    (holders,) = layer_holders(placement_of(0), 4)
    load_MD = split_loads(loads_ME, step_M, holders)
    np.testing.assert_allclose(load_MD.sum(axis=1), loads_ME.sum(axis=1))
    for b in range(step_M[-1] + 1):
        together = loads_ME[step_M == b].sum(axis=0)
        assert load_MD[step_M == b].sum(axis=0).max() == pytest.approx(least(together, 0))


@pytest.mark.parametrize("rule", [ReplicaRule.QUOTA, ReplicaRule.LP])
def test_a_rule_of_steps_is_no_table_of_devices(rule: ReplicaRule) -> None:
    placement = Placement.from_sets([HELD[0]], 6, rule)
    with pytest.raises(UsageError, match=f"rule {rule} goes by all counts of a step"):
        ReplicaTable.of(placement, 0, GROUP)
    once = Placement.from_sets([[[0, 1, 2], [3, 4, 5]]], 6, rule)
    assert ReplicaTable.of(once, 0, 1).choose(np.array([[4]]), np.zeros(1, int), np.zeros(1, int)).tolist() == [[1]]
