import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import eplb
from moeplan.solvers.cost import hops_kept
from moeplan.solvers.moves import best_labels, experts_moved, keep_in_place
from moeplan.solvers.placement import Placement

Array = NDArray[Any]


def a_placement(rng: np.random.Generator, slots: list[int], layers: int, experts: int) -> Placement:
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
def test_the_devices_get_the_names_under_which_the_fewest_experts_move(
    slots: list[int], group: int, rng: np.random.Generator
) -> None:
    for _ in range(8):
        new, old = (a_placement(rng, slots, 3, 6) for _ in range(2))
        kept = keep_in_place(new, old, group)
        assert experts_moved(kept, old).sum() == least_moves(new, old, group)
        assert experts_moved(kept, old).sum() <= experts_moved(new, old).sum()
        assert sorted(map(sorted, sets_of(kept)[0])) == sorted(map(sorted, sets_of(new)[0]))


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 4), (2, 2), (3, 2), (4, 1)]))
def test_a_placement_under_other_names_is_found_again_and_every_hop_stays_as_near(
    seed: int, shape: tuple[int, int]
) -> None:
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


def test_forty_nodes_of_eight_are_named_within_a_second(rng: np.random.Generator) -> None:
    worth = rng.random((320, 320))
    label = best_labels(worth, np.ones(320, np.int64), 8)
    assert sorted(label.tolist()) == list(range(320))
    assert worth[np.arange(320), label].sum() > worth.trace()


def test_placements_of_other_sizes_are_refused(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="expected as many"):
        keep_in_place(a_placement(rng, [2, 2], 2, 4), a_placement(rng, [2, 2], 3, 4), 2)
