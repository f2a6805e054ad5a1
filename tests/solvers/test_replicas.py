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


def engines_choice(holders: list[int], home: int, turn: int, expert: int, devices: range, group: int, rule: str) -> int:
    """What ENGINES' rules say: SGLang's fixed fair choice of each source rank, TensorRT-LLM's shifted round robin."""
    if rule == "round_robin":
        return holders[(turn + home) % len(holders)]
    if home in holders:
        return home

    def first(device: int) -> int | None:
        """The first on its node, where some are there and some elsewhere."""
        near = [one for one in holders if one // group == device // group]
        return near[0] if 0 < len(near) < len(holders) else None

    found = first(home)
    drawing = [one for one in devices if one not in holders and first(one) is None]
    return holders[(drawing.index(home) + expert) % len(holders)] if found is None else found


@given(placements(), st.integers(0, 10**6), st.sampled_from(["static", "round_robin"]))
def test_an_engines_rule_sends_every_token_where_its_words_say(
    found: tuple[Placement, int], turn: int, rule: Any
) -> None:
    placement, group = found
    table, held_ED = ReplicaTable.of(placement, 0, group, rule), placement.holds(0)
    ids = np.arange(placement.num_experts, dtype=np.uint16)[:, None]
    for home in range(placement.num_devices):
        expected = [
            engines_choice(np.flatnonzero(held_D).tolist(), home, turn, e, range(placement.num_devices), group, rule)
            for e, held_D in enumerate(held_ED)
        ]
        chosen = table.choose(ids, np.full(len(ids), home), np.full(len(ids), turn))
        assert chosen[:, 0].tolist() == expected


def test_a_fixed_choice_is_fair_among_the_devices_that_have_it() -> None:
    placement = Placement.from_sets([[[0], [1], [2], [3], [0], [1], [0], [1, 2, 3]]], 4)
    table = ReplicaTable.of(placement, 0, 8, "static")
    to = table.choose(np.zeros((8, 1), np.uint16), np.arange(8), np.zeros(8, np.int64))[:, 0]
    assert [to[home] for home in (0, 4, 6)] == [0, 4, 6]
    others = np.bincount(to[[1, 2, 3, 5, 7]], minlength=8)[[0, 4, 6]]
    assert others.sum() == 5
    assert others.max() - others.min() <= 1
