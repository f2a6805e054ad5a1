"""Placements, their replicas and whole groups, the names of their devices, and the outcomes they come with."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator
from numpy.typing import NDArray

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous, eplb
from moeplan.solvers.cost import hops_kept
from moeplan.solvers.moves import experts_moved, keep_in_place
from moeplan.solvers.outcome import Objective, Outcome, Status
from moeplan.solvers.placement import Placement, ReplicaRule, keeps_groups_whole, slots_for
from moeplan.solvers.replicas import ReplicaTable


@pytest.mark.parametrize("slots", [3, np.int64(3), np.array(3), [3, 3], np.array([3, 3], np.int32)], ids=repr)
def test_one_number_of_any_integer_type_holds_for_all_devices(slots: int | Sequence[int] | NDArray[Any]) -> None:
    found = slots_for(6, 2, slots)
    assert found.tolist() == [3, 3]
    assert found.dtype == np.int64


@pytest.mark.parametrize("slots", [[3], [3, 3, 3], [[3, 3]], -1, 7, 2**70, np.int64(2)], ids=repr)
def test_slots_that_do_not_fit_are_told(slots: Any) -> None:
    with pytest.raises(UsageError, match="expected"):
        slots_for(6, 2, slots)


def test_the_experts_that_a_device_holds_are_those_it_was_given_ascending() -> None:
    given = [[[3, 0], [], [1, 2, 3]], [[1, 2], [], [3, 0, 1]]]
    placement = Placement.from_sets(given, 4)
    assert [[placement.held(layer, device) for device in range(3)] for layer in range(2)] == [
        [sorted(experts) for experts in layer] for layer in given
    ]


def placed(rows: list[list[int]], slots: list[int], num_experts: int = 8) -> Placement:
    return Placement(np.array(rows, dtype=np.int32), np.array(slots), num_experts)


WHOLE, SPLIT = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 3, 5, 6, 7]


@pytest.mark.parametrize(
    ("row", "slots", "num_groups", "whole"),
    [
        ([2, 3, 6, 7, 0, 1, 4, 5], [4, 4], 4, True),  # two groups a device
        ([5, 7, 4, 6, 1, 2, 0, 3], [2, 2, 2, 2], 2, True),  # two devices a group
        ([6, 7, 0, 1, 2, 3, 4, 5], [2, 6], 4, True),  # devices of unequal slots
        (WHOLE, [4, 0, 4], 2, True),  # a dead one
        ([3, 0, 2, 1, 7, 4, 6, 5], [1] * 8, 2, True),
        (WHOLE, [8], 1, True),
        ([0, 1, 3, 2, 4, 5, 6, 7], [3, 5], 4, True),  # a group on two devices
        ([1, 2, 4, 5, 0, 3, 6, 7], [4, 4], 4, False),  # groups split
        ([4, 5, 0, 6, 1, 2, 3, 7], [2, 2, 2, 2], 2, False),
        (SPLIT, [4, 4], 2, False),
        ([*WHOLE, 0, 1], [5, 5], 4, False),  # replicas
        (WHOLE, [4, 4], 3, False),  # groups of no equal size
    ],
)
def test_blocks_of_whole_groups_are_whole_everywhere(
    row: list[int], slots: list[int], num_groups: int, whole: bool
) -> None:
    row = [e for held in np.split(row, np.cumsum(slots)[:-1]) for e in sorted(held.tolist())]
    first = WHOLE if sum(slots) == 8 else row
    assert keeps_groups_whole(placed([first, row], slots), num_groups) == whole


@given(st.data())
def test_whole_are_just_the_orders_in_which_group_limited_routing_chooses_the_same(data: st.DataObject) -> None:
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
    return Placement.from_sets(sets, num_experts, draw(st.sampled_from([ReplicaRule.NEAREST, ReplicaRule.EVEN]))), group


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
        return holders[(turn + home + expert) % len(holders)]
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
def test_an_engines_rule_sends_tokens_where_its_words_say(found: tuple[Placement, int], turn: int, rule: Any) -> None:
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


@given(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_slot_i_holds_expert_i_mod_e_sorted_on_each_device(num_experts: int, slots: list[int]) -> None:
    slots = [min(s, num_experts) for s in slots]
    slots[0] = num_experts if sum(slots) < num_experts else slots[0]
    found = contiguous.solve(2, num_experts, Cluster(1, len(slots)), slots=slots).placement
    flat, rows = np.arange(sum(slots)) % num_experts, []
    for end, size in zip(np.cumsum(slots), slots, strict=True):
        rows += sorted(flat[end - size : end].tolist())
    assert found.physical_to_logical.tolist() == [rows, rows]


def test_surplus_slots_cost_their_nominal_balance() -> None:
    found = contiguous.solve(1, 5, Cluster(1, 2)).outcome
    assert found.objective.value == pytest.approx(1.0)
    assert found.bound is None


@pytest.mark.parametrize(("num_layers", "num_experts"), [(0, 4), (1, 0)])
def test_nothing_to_place_is_refused(num_layers: int, num_experts: int) -> None:
    with pytest.raises(UsageError, match="at least one of each"):
        contiguous.solve(num_layers, num_experts, Cluster(1, 2))


def a_placement(rng: Generator, slots: list[int], layers: int, experts: int) -> Placement:
    """Experts dealt at random; surplus slots hold replicas."""
    loads, devices = rng.random((layers, experts)) ** 4, len(slots)
    return eplb.solve(loads, Cluster(1, devices), slots=slots).placement


def sets_of(placement: Placement) -> list[list[frozenset[int]]]:
    held = [placement.holds(layer).T for layer in range(placement.num_layers)]
    return [[frozenset(np.flatnonzero(row).tolist()) for row in layer] for layer in held]


def least_moves(new: Placement, old: Placement, group: int) -> int:
    """By trying every renaming of nodes and of the devices inside them."""
    now, before, nodes = sets_of(new), sets_of(old), new.num_devices // group
    best = new.num_slots * new.num_layers
    for order in itertools.permutations(range(nodes)):
        for inside in itertools.product(itertools.permutations(range(group)), repeat=nodes):
            label = [order[d // group] * group + inside[d // group][d % group] for d in range(new.num_devices)]
            if all(new.slots[d] == new.slots[label[d]] for d in range(new.num_devices)):
                moved = sum(len(a[d] - b[label[d]]) for a, b in zip(now, before, strict=True) for d in range(len(a)))
                best = min(best, moved)
    return best


@pytest.mark.parametrize(
    ("slots", "group"), [([2, 2, 2], 3), ([2, 2, 2, 2], 2), ([3, 3, 3, 3], 2), ([2, 2, 2, 2], 1), ([1, 3, 3, 1], 4)]
)
def test_devices_get_the_names_with_which_the_fewest_experts_move(slots: list[int], group: int, rng: Generator) -> None:
    for _ in range(8):
        new, old = (a_placement(rng, slots, 3, 6) for _ in range(2))
        kept = keep_in_place(new, old, group)
        assert experts_moved(kept, old).sum() == least_moves(new, old, group)
        assert experts_moved(kept, old).sum() <= experts_moved(new, old).sum()
        assert sorted(map(sorted, sets_of(kept)[0])) == sorted(map(sorted, sets_of(new)[0]))


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 4), (2, 2), (3, 2), (4, 1)]))
def test_a_placement_under_other_names_is_found_again_with_every_hop_as_near(seed: int, shape: tuple[int, int]) -> None:
    rng, (nodes, group) = np.random.default_rng(seed), shape
    devices = nodes * group
    old = a_placement(rng, [3] * devices, 2, 2 * devices)
    names = np.arange(devices).reshape(nodes, group)[rng.permutation(nodes)]
    names = rng.permuted(names, axis=1).ravel()
    new = Placement.from_sets([[sorted(layer[d]) for d in names] for layer in sets_of(old)], 2 * devices)
    back, weights = keep_in_place(new, old, group), rng.random((1, 2 * devices, 2 * devices))
    assert (back.physical_to_logical == old.physical_to_logical).all()
    before, after = (hops_kept(weights, one, group) for one in (new, back))
    assert before.device == pytest.approx(after.device)
    assert before.node == pytest.approx(after.node)


def test_moves_are_counted_by_layer_and_a_replica_that_goes_is_none() -> None:
    old = Placement.from_sets([[[0, 1], [0, 2]], [[0, 1], [1, 2]]], 3)
    new = Placement.from_sets([[[0, 1], [1, 2]], [[0, 1], [1, 2]]], 3)
    assert experts_moved(new, old).tolist() == [1, 0]


def test_placements_of_other_sizes_are_refused(rng: Generator) -> None:
    with pytest.raises(ValueError, match="expected as many"):
        keep_in_place(a_placement(rng, [2, 2], 2, 4), a_placement(rng, [2, 2], 3, 4), 2)


def outcome(status: Status, value: float, sense: Any, bound: float | None, proven: bool) -> Outcome:
    """Of a solve that began two seconds ago."""
    began = time.perf_counter() - 2
    objective = Objective("hop_cost", value, sense)
    return Outcome.of(status=status, objective=objective, bound=bound, proven=proven, started=began, backend="moeplan")


@pytest.mark.parametrize("status", [Status.FEASIBLE, Status.TIME_LIMIT, Status.INTERRUPTED])
def test_a_proven_value_is_optimal_however_the_solve_ended_and_its_own_bound(status: Status) -> None:
    found = outcome(status, 1e-17, "min", 0.0, proven=True)
    assert (found.status, found.bound, found.gap) == (Status.OPTIMAL, 1e-17, 0)
    assert 2 <= found.wall_s < 60
    for bound, gap in ((None, None), (4.0, 0.25)):
        unproven = outcome(status, 3.0, "max", bound, proven=False)
        assert (unproven.status, unproven.bound, unproven.gap) == (status, bound, gap)
