from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.solvers.replicas import ReplicaTable


def rule_by_hand(holders: list[int], home: int, turn: int, group: int, rule: ReplicaRule) -> int:
    """The words of the contract: own device, else own node, else as even: (sample + position) mod n."""
    if rule is ReplicaRule.NEAREST:
        if home in holders:
            return home
        holders = [device for device in holders if device // group == home // group] or holders
    return holders[turn % len(holders)]


@st.composite
def placements(draw: Any) -> tuple[Placement, int]:
    num_nodes, group, num_experts = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    held = rng.random((num_nodes * group, num_experts)) < 0.4
    held[rng.integers(num_nodes * group, size=num_experts), np.arange(num_experts)] = True
    sets = [[np.flatnonzero(row).tolist() for row in held]]
    return Placement.from_sets(sets, num_experts, draw(st.sampled_from(ReplicaRule))), group


@given(placements(), st.integers(0, 10**6))
def test_every_token_goes_where_the_rule_says_from_wherever_it_is(found: tuple[Placement, int], turn: int) -> None:
    placement, group = found
    table = ReplicaTable.of(placement, 0, group)
    held_ED = placement.holds(0)
    ids = np.array([[e] for e in range(placement.num_experts)], dtype=np.uint16)
    for home in range(placement.num_devices):
        expected = [
            rule_by_hand(np.flatnonzero(held_ED[e]).tolist(), home, turn, group, placement.replica_rule)
            for e in range(placement.num_experts)
        ]
        homes, turns = np.full(len(ids), home), np.full(len(ids), turn)
        assert table.choose(ids, homes, turns)[:, 0].tolist() == expected
        devices_ER, count_E = table.seen_from(home)
        assert devices_ER[np.arange(len(ids)), turn % count_E].tolist() == expected


def test_an_id_that_names_no_expert_goes_nowhere() -> None:
    table = ReplicaTable.of(Placement.from_sets([[[0, 1], [0, 2]]], 3), 0, 2)
    ids = np.array([[65_535, 2]], dtype=np.uint16)
    assert table.choose(ids, np.array([0]), np.array([0])).tolist() == [[-1, 1]]
