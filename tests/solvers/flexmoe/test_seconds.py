import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.solvers import quota
from moeplan.solvers.flexmoe.seconds import judged, over_steps, served_ports
from moeplan.solvers.flexmoe.state import holders_in
from moeplan.solvers.step_deals import QUOTA, capacity_deal, even_deal, pair_ports
from tests.solvers.flexmoe.layers import COSTS, Array, layers, naive_over_steps, naive_seconds

Layer = tuple[Array, Array, int]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12), st.sampled_from([0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 1]))
def test_steps_count_by_their_mean_or_by_the_least_figure_that_a_share_of_them_does_not_exceed(
    figures: list[float], quantile: float
) -> None:
    assert over_steps(np.array(figures), quantile) == pytest.approx(naive_over_steps(figures, quantile))


@given(layers(), st.integers(0, 2))
def test_seconds_are_those_of_every_pair_on_its_way(layer: Layer, rule: int) -> None:
    table, batches, group = layer
    holders = holders_in(table, batches.shape[1], group)
    routed, balance = [], []
    for pairs in batches:
        if rule == QUOTA:
            dealt, _ = quota.split(pairs, holders, 7)
        else:
            dealt = (even_deal if rule == 1 else capacity_deal)(pairs, holders)
        of = zip(holders.expert.tolist(), holders.device.tolist(), dealt.tolist(), strict=True)
        routed.append({(e, g, d): n for e, d, row in of for g, n in enumerate(row) if n})
        load = np.bincount(holders.device, dealt.sum(axis=1), len(table))
        balance.append(load.max() * len(table) / max(load.sum(), 1))
    found_balance, seconds = judged(batches, holders, COSTS, rule)
    assert seconds.sum() == pytest.approx(naive_seconds(table, batches, routed, group))
    assert found_balance == pytest.approx(np.mean(balance))


@given(layers())
def test_ports_need_no_deal(layer: Layer) -> None:
    table, batches, group = layer
    holders, pairs = holders_in(table, batches.shape[1], group), batches[0]
    total = pairs.sum(axis=1)
    most, _, _ = quota.least(total, holders)
    served = quota.nearest(pairs, total, holders, most, 7)
    expected = pair_ports(quota.deal(pairs, served, holders), holders)
    assert served_ports(pairs, served, holders).tolist() == expected.tolist()


@given(layers(), st.booleans())
def test_replicas_share_evenly_and_nothing_is_lost(layer: Layer, paper: bool) -> None:
    table, batches, group = layer
    holders, pairs = holders_in(table, batches.shape[1], group), batches[0]
    dealt = (capacity_deal if paper else even_deal)(pairs, holders)
    assert (dealt >= 0).all()
    for e, of_expert in enumerate(pairs):
        slots = slice(holders.first[e], holders.first[e + 1])
        assert dealt[slots].sum(axis=0).tolist() == of_expert.tolist()
        if paper:  # whole capacities, exactly, and own tokens first
            assert np.ptp(dealt[slots].sum(axis=1)) <= 1
            for p, d in enumerate(holders.device[slots].tolist(), holders.first[e]):
                assert dealt[p, d] == min(of_expert[d], dealt[p].sum())
        else:
            assert (np.ptp(dealt[slots], axis=0) <= 1).all()
