from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator

from moeplan.solvers.draws import exponential
from moeplan.solvers.exflow import kernel
from moeplan.solvers.exflow.kernel import anneal, descend, resample
from moeplan.solvers.exflow.messages import Deals, deals_of, sum_over
from moeplan.solvers.exflow.programme import Layout, Programme, Terms
from moeplan.solvers.exflow.state import State, state_of, swap
from tests.solvers.builders import Array

LAYERS, EXPERTS = 4, 8


def near_of(nodes: int, group: int, rho: float) -> Array:
    node = np.repeat(np.arange(nodes), group)
    return np.asarray((rho - 1) * (node[:, None] == node) + np.eye(nodes * group))


def programme_of(rng: Generator, slots: list[int], nodes: int = 1, rho: float = 1.0) -> Programme:
    weights = [rng.integers(0, 50, (EXPERTS, EXPERTS)).astype(float) for _ in range(LAYERS - 1)]
    group = len(slots) // nodes
    return Programme(weights, (EXPERTS,) * LAYERS, np.array(slots), near_of(nodes, group, rho), group)


def pairs_of(rng: Generator) -> Array:
    half = rng.integers(0, 50, (LAYERS, EXPERTS, EXPERTS)).astype(float)
    return np.asarray((half + half.transpose(0, 2, 1)) * (1 - np.eye(EXPERTS)))


def layout_of(programme: Programme, rng: Generator) -> Layout:
    return [rng.permutation(programme.places)[:EXPERTS] for _ in range(LAYERS)]


def seed_of(number: int) -> Array:
    return np.array([number + 1], np.uint64)


def assert_consistent(programme: Programme, terms: Terms, state: State) -> None:
    """The state is what its homes alone would give."""
    layout = [home[:EXPERTS] for home in state.home]
    again = state_of(programme, terms, layout)
    assert (state.pull == again.pull).all()
    assert (state.node_pull == again.node_pull).all()
    assert (state.occupant[np.arange(LAYERS)[:, None], state.place] == np.arange(len(programme.places))).all()
    assert (programme.places[state.place] == state.home).all()
    assert state.held == pytest.approx(again.held)
    for device, slots in enumerate(programme.slots):
        assert ((state.home == device).sum(axis=1) == slots).all()


@settings(max_examples=15)
@given(st.integers(0, 2**31), st.sampled_from([[2, 2, 2, 2], [4, 1, 3, 2], [4, 0, 4, 1]]), st.booleans(), st.booleans())
def test_pulls_and_places_stay_what_the_homes_give(seed: int, slots: list[int], two_nodes: bool, pairs: bool) -> None:
    rng = np.random.default_rng(seed)
    programme = programme_of(rng, slots, *((2, 5.0) if two_nodes else (1, 1.0)))
    terms = Terms(beside=pairs_of(rng) if pairs else None)
    state = state_of(programme, terms, layout_of(programme, rng))
    for _ in range(10):
        swap(state, np.array([[rng.integers(LAYERS), *rng.choice(len(programme.places), 2, replace=False)]]))
    assert_consistent(programme, terms, state)
    anneal(state, tuple(deals_of(m, LAYERS) for m in (1, 2, 3)), 30, 40.0, 5.0, seed_of(seed))
    assert_consistent(programme, terms, state)


def best_deals_by_brute_force(programme: Programme, terms: Terms, layout: Layout, p: int, q: int) -> float:
    """The best value when the experts of p and q are dealt anew in every layer: all ways, all layers (Viterbi)."""
    ways: list[list[Array]] = []
    for device_E in layout:
        on_either = np.flatnonzero((device_E == p) | (device_E == q))
        size, number = len(on_either), int((device_E == p).sum())
        ways.append([])
        for bits in range(2**size):
            to_p = bits >> np.arange(size) & 1
            if to_p.sum() == number:
                dealt = device_E.copy()
                dealt[on_either] = np.where(to_p, p, q)
                ways[-1].append(dealt)

    def inside(layer: int, device_E: Array) -> float:
        return terms.inside(programme, [device_E] * LAYERS, layer)

    best = [inside(0, way) for way in ways[0]]
    for cut, weight in enumerate(programme.weights):
        best = [
            max(
                before + float((weight * programme.near[here[:, None], there]).sum())
                for before, here in zip(best, ways[cut], strict=True)
            )
            + inside(cut + 1, there)
            for there in ways[cut + 1]
        ]
    return max(best)


@settings(max_examples=15)
@given(st.integers(0, 2**31), st.booleans(), st.booleans(), st.sampled_from([(0, 1), (3, 0), (2, 1)]))
def test_a_cold_block_move_finds_the_best_deal(
    seed: int, two_nodes: bool, pairs: bool, devices: tuple[int, int]
) -> None:
    rng = np.random.default_rng(seed)
    programme = programme_of(rng, [2, 2, 2, 2], *((2, 5.0) if two_nodes else (1, 1.0)))
    terms = Terms(beside=pairs_of(rng) if pairs else None)
    layout = layout_of(programme, rng)
    state = state_of(programme, terms, layout)
    resample(state, deals_of(2, LAYERS), *devices, 0.0, seed_of(seed))
    assert terms.value(programme, list(state.home)) == best_deals_by_brute_force(programme, terms, layout, *devices)


@pytest.mark.parametrize(("kind", "num_layouts"), [("homes", 36), ("pairs", 36), ("twins", 12), ("priced", 36)])
def test_block_moves_draw_deals_by_the_boltzmann_distribution(kind: str, num_layouts: int) -> None:
    rng, temperature = np.random.default_rng(3), 40.0
    weights = [rng.integers(0, 50, (4, 4)).astype(float)]
    programme = Programme(weights, (4, 4), np.array([2, 2]), np.eye(2), 2)
    half = rng.integers(0, 30, (2, 4, 4)).astype(float)
    beside = half + half.transpose(0, 2, 1) if kind == "pairs" else None
    twin = np.array([[0, -1, -1, 0], [-1] * 4]) if kind == "twins" else None  # each stays where its twin is not
    terms = Terms(beside=beside, twin=twin)
    first, price = programme.first_layout(), 25 if kind == "priced" else 0
    state, deals, seed = state_of(programme, terms, first), deals_of(2, 2), seed_of(5)
    for pull, home in zip(state.pull, first, strict=True):
        pull[home, np.arange(4)] += price
    state = state._replace(tied=state.tied or price > 0)
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(20_000):
        resample(state, deals, 0, 1, temperature, seed)
        key = tuple(state.home.ravel().tolist())
        seen[key] = seen.get(key, 0) + 1
    worth = {
        key: terms.value(programme, list(np.reshape(key, (2, 4))))
        + price * int((np.array(key) == np.ravel(first)).sum())
        for key in seen
    }
    expected = {key: np.exp(value / temperature) for key, value in worth.items()}
    assert len(seen) == num_layouts
    total = sum(expected.values())
    for key, count in seen.items():
        assert count / 20_000 == pytest.approx(expected[key] / total, abs=0.01)


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e6])
def test_caps_hold_and_twins_stay_apart_at_every_temperature(temperature: float) -> None:
    rng = np.random.default_rng(1)
    programme = programme_of(rng, [2, 2, 2, 2])
    twin = np.tile([0, 0, 1, 1, 2, 2, -1, -1], (LAYERS, 1))
    load = np.tile([5.0, 5, 4, 4, 3, 3, 1, 1], (LAYERS, 1))
    layout = [np.array([0, 1, 2, 3, 2, 3, 0, 1])] * LAYERS
    cap, moved = np.full(LAYERS, 8.5), False
    state = state_of(programme, Terms(load=load, cap=cap, twin=twin), layout)
    deals = tuple(deals_of(m, LAYERS) for m in (1, 2))
    for step in range(200):
        anneal(state, deals, 1, temperature, temperature, seed_of(step))
        for layer in range(LAYERS):
            assert np.bincount(state.home[layer], load[layer], 4).max() <= 8.5
            for number in range(3):
                assert len(set(state.home[layer][twin[layer] == number])) == 2
        moved |= bool((state.home != layout)[twin >= 0].any())
    assert temperature < 1 or moved


def test_a_descent_never_loses_value() -> None:
    rng = np.random.default_rng(2)
    programme, terms = programme_of(rng, [4, 1, 3, 2], 2, 5.0), Terms(beside=pairs_of(rng))
    state = state_of(programme, terms, layout_of(programme, rng))
    deals, values = tuple(deals_of(m, LAYERS) for m in (1, 2, 3, 4)), []
    for device in range(4):
        values.append(terms.value(programme, [home[:EXPERTS] for home in state.home]))
        descend(state, deals, device, seed_of(device))
    assert values == sorted(values)
    assert values[-1] > values[0]


def test_weights_that_are_no_integers_are_scaled_and_lose_next_to_nothing() -> None:
    rng = np.random.default_rng(4)
    weights = [rng.random((EXPERTS, EXPERTS)) * 1e-9 for _ in range(LAYERS - 1)]
    programme = Programme(weights, (EXPERTS,) * LAYERS, np.array([4, 4]), np.eye(2), 2)
    layout = layout_of(programme, rng)
    state = state_of(programme, Terms(), layout)
    expected = programme.worth(layout, 1)
    assert state.pull[1, :, :EXPERTS].T * state.worth[0] == pytest.approx(expected, rel=1e-6)


@given(st.floats(-700, 700))
def test_the_exponential_is_that_of_the_library(x: float) -> None:
    assert exponential(x) == pytest.approx(np.exp(x), rel=1e-8)


def summed(deals: Deals, temperature: float) -> Array:
    """The messages of all layers, every two ways of neighbouring layers tried."""
    bits = np.arange(deals.m)
    dealt = np.hstack([half[:, None] >> bits & 1 for half in (deals.low, deals.high)])
    spin, messages = 2 * dealt - 1, [deals.message[0]]
    for link, own in zip(deals.link, deals.own[1:], strict=True):
        total = messages[-1][:, None] / temperature + spin @ (link / temperature / 2) @ spin.T
        messages.append(temperature * np.logaddexp.reduce(total, axis=0) + own)
    return np.array(messages)


def assert_summed(deals: Deals, temperature: float = 1.0) -> int:
    """Messages are sums over all ways; the pairs of ways that were summed one by one."""
    expected = summed(deals, temperature)
    steep = sum_over(deals, temperature, False)
    assert deals.message == pytest.approx(expected, rel=1e-12, abs=1e-6 * temperature)
    return steep


def deals_at_random(m: int, worth: float, link: float) -> Deals:
    rng, deals = np.random.default_rng(m), deals_of(m, 2)
    deals.message[0], deals.own[1] = rng.random((2, len(deals.low))) * worth
    deals.link[:] = rng.random(deals.link.shape) * link
    return deals


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("links", [(1, 1, 1), (15, 1e4, 1), (1e6, 1, 15), (1, 1, 1e4), (1e4, 1e6, 1e4)])
def test_where_devices_might_trade_names_half_the_sums_are_enough(m: int, links: tuple[float, ...]) -> None:
    rng, deals = np.random.default_rng(m), deals_of(m, LAYERS)
    deals.own[:] = rng.random(deals.own.shape)
    deals.own[:] += deals.own[:, ::-1].copy()
    deals.link[:] = rng.random(deals.link.shape) * np.array(links)[:, None, None]
    deals.message[0] = deals.own[0]
    expected, pairs = summed(deals, 1.0), len(deals.low) ** 2 * sum(link >= 1e4 for link in links)
    for mirrored, share in ((False, 1), (True, 2)):
        deals.message[1:] = np.nan
        assert sum_over(deals, 1.0, mirrored) * share == pairs
        assert deals.message == pytest.approx(expected, rel=1e-11, abs=1e-6)


@pytest.mark.parametrize(
    ("link", "below"), [(10.0, 1e3), (300.0, 340.0), (309.0, 617.0), (320.0, 651.0), (400.0, 651.0)]
)
def test_a_way_far_below_the_best_counts_just_where_its_links_make_up_for_it(link: float, below: float) -> None:
    deals = deals_of(1, 2)
    deals.link[0], deals.message[0] = link * np.eye(2), [0.0, -below]
    assert_summed(deals)


@pytest.mark.parametrize(("m", "link", "below"), [(2, [100, -100, 0, 0], 651), (4, [12, -12] * 4, 700)])
def test_links_of_some_members_or_of_all_together_make_up_for_it(m: int, link: list[float], below: float) -> None:
    deals = deals_of(m, 2)
    deals.link[0] = deals.spin[:, :1] * link
    deals.message[0], deals.message[0, 0], deals.message[0, -1] = -np.inf, -below, 0
    assert_summed(deals)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_devices_that_might_trade_names_keep_at_least_half_of_the_experts_of_the_last_layer(m: int, tied: bool) -> None:
    rng, deals, seed = np.random.default_rng(m), deals_of(m, LAYERS), seed_of(m)
    weights = [rng.integers(0, 50, (2 * m, 2 * m)).astype(float) for _ in range(LAYERS - 1)]
    programme = Programme(weights, (2 * m,) * LAYERS, np.array([m, m]), np.eye(2), 2)
    state = state_of(programme, Terms(), programme.first_layout())._replace(tied=tied)
    most = 0
    for _ in range(200):
        before = state.home[-1].copy()
        resample(state, deals, 0, 1, 1e6, seed)
        most = max(most, int((state.home[-1] != before).sum()))
    assert most == (2 * m if tied else 2 * (m // 2))


@pytest.mark.parametrize("devices", [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_what_stays_on_the_larger_of_two_devices_counts(devices: tuple[int, int]) -> None:
    rng = np.random.default_rng(9)
    programme, terms = programme_of(rng, [1, 4, 3]), Terms()
    m = min(int(programme.slots[d]) for d in devices)
    state, deals = state_of(programme, terms, layout_of(programme, rng)), deals_of(m, LAYERS)
    for step in range(50):
        before = terms.value(programme, list(state.home))
        resample(state, deals, *devices, 0.0, seed_of(step))
        assert terms.value(programme, list(state.home)) >= before


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("temperature", [1e-3, 1.0])
@pytest.mark.parametrize("link", [10.0, 15.0, 60.0, 100.0, 300.0, 1e6])
@pytest.mark.parametrize("worth", [1e-3, 1.0, 1000.0, 1e6])
def test_messages_are_the_sums_whatever_some_ways_are_worth(
    m: int, temperature: float, link: float, worth: float
) -> None:
    deals = deals_at_random(m, worth * temperature, link * temperature)
    for _ in range(2):  # nothing of a sum is left in the next
        steep, pairs = assert_summed(deals, temperature), len(deals.low) ** 2
        assert steep == {10.0: 0, 1e6: pairs}.get(link, steep)
        assert steep in (0, pairs)
        deals.link[:] = deals.link[:, ::-1]


def test_the_pairs_of_ways_that_are_summed_one_by_one_are_counted() -> None:
    programme = programme_of(np.random.default_rng(5), [4, 4])
    state, deals = state_of(programme, Terms(), programme.first_layout()), deals_of(4, LAYERS)
    cold, warm = (anneal(state, (deals,) * 4, 10, one, one, seed_of(5)) for one in (1e-6, 1e6))
    assert (cold, warm) == (10 * (LAYERS - 1) * 70 * 35, 0)


def test_partners_are_drawn_by_what_pulls_a_random_expert_away() -> None:
    rng = np.random.default_rng(6)
    programme = programme_of(rng, [2, 2, 2, 2])
    state, seed = state_of(programme, Terms(), layout_of(programme, rng)), seed_of(6)
    pull = np.array([state.pull[layer, :, state.home[layer] == 1] for layer in range(LAYERS)], float)  # [L, 2, D]
    pull[:, :, 1] = 0
    expected = (pull / pull.sum(axis=2, keepdims=True)).mean(axis=(0, 1))
    drawn = np.bincount([kernel._partner(state, 1, seed) for _ in range(20_000)], minlength=4)
    assert drawn[1] == 0
    assert drawn / 20_000 == pytest.approx(expected, abs=0.012)
    assert expected.max() > 1 / 3 + 0.02  # not merely any


def test_a_device_that_nothing_pulls_from_gets_any_partner_but_itself() -> None:
    programme = programme_of(np.random.default_rng(6), [2, 2, 2, 2])
    weights = [np.zeros((EXPERTS, EXPERTS))] * (LAYERS - 1)
    nothing = Programme(weights, programme.sizes, programme.slots, programme.near, 4)
    state, seed = state_of(nothing, Terms(), nothing.first_layout()), seed_of(6)
    drawn = np.bincount([kernel._partner(state, 2, seed) for _ in range(9000)], minlength=4)
    assert drawn / 9000 == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3], abs=0.02)


def chosen(weights: list[Array]) -> Array:
    """6000 choices of two of the eight experts of each of two devices, `[6000, 3, 4]`."""
    programme = Programme(weights, (16,) * 3, np.array([8, 8]), np.eye(2), 2)
    state, deals, seed, seen = state_of(programme, Terms(), programme.first_layout()), deals_of(2, 3), seed_of(7), []
    for _ in range(6000):
        kernel._choose(state, deals, 0, 1, seed)
        assert (deals.side == [1, 1, 0, 0]).all()
        seen.append(deals.member.copy())
    return np.array(seen)


AMONG_EIGHT = 1 - (7 / 8) ** 8  # how often an expert is among the draws of a pick


def test_the_most_wished_of_a_few_random_experts_of_each_device_are_chosen() -> None:
    pulled = np.zeros((16, 16))
    pulled[5, 12] = 10  # pulls expert 5 to the other device
    seen = chosen([pulled, np.zeros((16, 16))])[:, 0]
    assert (seen[:, :2] < 8).all()
    assert (seen[:, 2:] >= 8).all()
    assert (seen[:, 0] != seen[:, 1]).all()
    assert (seen[:, 2] != seen[:, 3]).all()
    assert (seen[:, 0] == 5).mean() == pytest.approx(AMONG_EIGHT, abs=0.02)


def test_every_other_time_experts_that_follow_those_chosen_in_the_layer_before_are_chosen() -> None:
    followed, pulled = np.zeros((16, 16)), np.zeros((16, 16))
    followed[:4, 3], followed[4:8, 6] = 10, 10
    pulled[5, 12] = 10
    by_chance = (1 - AMONG_EIGHT) / 7
    before, after = chosen([followed, pulled])[:, :2].swapaxes(0, 1)
    for those, follower in ((before[:, :2] < 4, 3), (before[:, :2] >= 4, 6)):
        seen = after[those.all(axis=1), 0]
        assert (seen == follower).mean() == pytest.approx(AMONG_EIGHT / 2, abs=0.04)
        assert (seen == 5).mean() == pytest.approx((AMONG_EIGHT + by_chance) / 2, abs=0.04)


def test_the_temperature_of_block_moves_falls_geometrically(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, seen = np.random.default_rng(8), list[float]()

    def noted(*given: Any) -> int:
        seen.append(given[4])
        return 7

    programme = programme_of(rng, [2, 2, 2, 2])
    state = state_of(programme, Terms(), programme.first_layout())
    monkeypatch.setattr(kernel, "resample", noted)
    interpreted = cast(Any, anneal).py_func
    assert interpreted(state, (deals_of(2, LAYERS),), 8, 256.0, 1.0, seed_of(8)) == 8 * 7
    assert seen == pytest.approx([256, 128, 64, 32, 16, 8, 4, 2])


@pytest.mark.parametrize("link", [1.0, 1e3])
def test_ways_that_are_forbidden_count_for_nothing(link: float) -> None:
    deals = deals_at_random(4, 1.0, link)
    deals.message[0, 1:] = -np.inf
    assert_summed(deals)
    deals.message[0] = -np.inf
    sum_over(deals, 1.0, False)
    assert (deals.message[1] == -np.inf).all()
