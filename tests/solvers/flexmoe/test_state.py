import numpy as np
import pytest
from hypothesis import given

from moeplan.solvers.flexmoe.follow import first_homes
from moeplan.solvers.flexmoe.state import holders_in, holds, homes_after, moves_seconds, sum_ports, sums_of, transfers
from moeplan.solvers.quota import holders_of
from tests.solvers.flexmoe.layers import COSTS, Array, holders, layers, naive_sums

Layer = tuple[Array, Array, int]


@given(layers())
def test_holders_of_a_table_are_those_of_its_filled_slots(layer: Layer) -> None:
    table, pairs, group = layer
    filled = [row[row >= 0] for row in table]
    expected = holders_of(np.concatenate(filled), np.array([*map(len, filled)]), pairs.shape[1], group)
    found = holders_in(table, pairs.shape[1], group)
    for name in set(expected._fields) - {"column"}:
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert table.ravel()[found.column].tolist() == found.expert.tolist()
    assert (found.column // table.shape[1]).tolist() == found.device.tolist()


@given(layers())
def test_sums_are_of_every_two_holders(layer: Layer) -> None:
    table, pairs, group = layer
    found = sum_ports(holders_in(table, pairs.shape[1], group))
    assert found == pytest.approx(naive_sums(table, pairs.shape[1], group))


@given(layers())
def test_replicas_are_summed_among_themselves_and_then_at_home(layer: Layer) -> None:
    table, pairs, group = layer
    home, expected = first_homes(table, pairs.shape[1]), np.zeros((2, 2, 2, len(table)))
    for expert, owner in enumerate(home.tolist()):
        replicas = {*holders(table, expert)} - {owner}
        for device in replicas:
            for stage, to in [(0, other) for other in replicas - {device}] + [(1, owner)]:
                expected[stage, int(device // group != to // group), (0, 1), (device, to)] += 1 / len(replicas)
    assert sums_of(holders_in(table, pairs.shape[1], group), home) == pytest.approx(expected)


@given(layers(), layers())
def test_what_moves_comes_from_a_holder_near_where_there_is_one(first: Layer, second: Layer) -> None:
    before, pairs, group = first
    after = np.roll(before, 1, axis=0)
    num_experts = pairs.shape[1]
    home = np.array([holders(before, e)[0] for e in range(num_experts)])
    held, new = holds(before, num_experts), holds(after, num_experts)
    moved = homes_after(home, new, group)
    assert all(moved[e] in holders(after, e) for e in range(num_experts))
    assert all(moved[e] == home[e] for e in range(num_experts) if home[e] in holders(after, e))
    sent = transfers(held, new, home, moved, COSTS, group)
    assert {(e, d) for e, _, d in sent.tolist()} == {(int(e), int(d)) for d, e in np.argwhere(new & ~held)}
    ports = np.zeros((2, 2, len(before)))
    for e, source, target in sent.tolist():
        assert held[source, e]
        near = [d for d in holders(before, e) if d // group == target // group]
        assert not near or source in near
        far = int(source // group != target // group)
        ports[far, 0, source] += 1
        ports[far, 1, target] += 1
    rates = np.array([COSTS.intra_sum_s_per_byte, COSTS.inter_sum_s_per_byte])
    expected = COSTS.moves_s + COSTS.moved_bytes * (ports.max(axis=(1, 2)) * rates).max() if len(sent) else 0.0
    assert moves_seconds(sent, len(before), COSTS, group) == pytest.approx(expected)
    owners = transfers(held, new, home, moved, COSTS._replace(replicas_free=True), group)
    lost = [(e, home[e], moved[e]) for e in range(num_experts) if home[e] not in holders(after, e)]
    assert owners.tolist() == [list(one) for one in lost]
