"""LUFFY's homes against naive counts: attention and exchanges, bounds, what moves and swaps reach, Algorithm 1."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.profilers.cluster import Cluster, Link
from moeplan.solvers import luffy, netmoe
from moeplan.solvers.luffy import bound
from moeplan.solvers.luffy.bound import least_attention, least_seconds, padded_optimum
from moeplan.solvers.luffy.growth import growth
from moeplan.solvers.luffy.rehoming import _even
from moeplan.solvers.netmoe.bottleneck import Channels, rows_of
from moeplan.solvers.netmoe.state import Held, exchange, placed, state_of, time_of
from moeplan.solvers.netmoe.swaps import PAIRS, _descended, _kicked, shorten
from tests.builders import known
from tests.solvers.builders import Array, naive_loads

LINKS = dict(map(Link.parse, ["intra=400:2", "inter=50:9"]))
BYTES = 5760.0


@dataclass(frozen=True)
class Step:
    copies: Array
    following: Array | None
    attention: luffy.Attention
    cluster: Cluster

    @property
    def places(self) -> Array:
        return self.attention.places(self.cluster.num_devices)

    @property
    def traffic(self) -> netmoe.Traffic:
        return netmoe.Traffic(self.copies.astype(float), self.following)


@st.composite
def steps(draw: st.DrawFn, largest: int = 9) -> Step:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    cluster = Cluster(draw(st.integers(1, 3)), draw(st.integers(1, 3)), LINKS)
    num_samples = draw(st.integers(1, largest))
    tokens = rng.integers(1, draw(st.sampled_from([4, 600])), num_samples)
    copies = rng.integers(0, 2 * tokens[:, None] + 1, (num_samples, cluster.num_devices))
    following = rng.integers(0, 900, copies.shape) / 4 if draw(st.booleans()) else None
    law = luffy.Law(
        draw(st.sampled_from([0.0, 1e-5])),
        draw(st.sampled_from([0.0, 71e-9])),
        draw(st.sampled_from([1e-12, 1e-9])),
        draw(st.sampled_from(["packed", "padded"])),
        draw(st.sampled_from(["equal", "free"])),
        draw(st.sampled_from([None, 1.0, 1.5])),
        start_s=draw(st.sampled_from([0.0, 3e-5])),
    )
    return Step(copies, following, luffy.Attention(law, tokens, tokens**2), cluster)


def naive_attention(step: Step, home: Array) -> float:
    law, busiest = step.attention.law, 0.0
    for device in range(step.cluster.num_devices):
        here = [int(n) for n, at in zip(step.attention.tokens, home, strict=True) if at == device]
        if not here:
            continue
        if law.batches == "padded":
            seconds = law.call_s + len(here) * (law.token_s * max(here) + law.square_s * max(here) ** 2)
        else:
            seconds = law.call_s * len({*here}) + sum(law.token_s * n + law.square_s * n**2 for n in here)
        busiest = max(busiest, law.start_s + seconds)
    return busiest


def naive_seconds(step: Step, home: Array) -> float:
    total, links, cluster = naive_attention(step, home), step.cluster.links, step.cluster
    for copies in (step.copies, step.following):
        if copies is None:
            continue
        *_, intra, inter = naive_loads(copies, np.arange(cluster.num_devices), home, cluster)
        intra_s = links["intra"].latency_s + links["intra"].s_per_byte * intra * BYTES
        inter_s = links["inter"].latency_s + links["inter"].s_per_byte * inter * BYTES
        total += max(intra_s * (cluster.devices_per_node > 1), inter_s * (cluster.num_nodes > 1))
    return total


def naive_tokens(step: Step, home: Array) -> list[int]:
    held = [step.attention.tokens[home == device] for device in range(step.cluster.num_devices)]
    if step.attention.law.batches == "padded":
        return [len(here) * int(here.max(initial=0)) for here in held]
    return [int(here.sum()) for here in held]


def rehome(step: Step, method: str = "joint", **options: Any) -> netmoe.Rehomed:
    options = {"next_copies": step.following, "copy_bytes": BYTES} | options
    return luffy.rehome(method, step.copies, step.copies.sum(axis=1), step.cluster, step.attention, **options)


def held_of(step: Step) -> Held:
    attention = step.attention
    return Held(
        np.append(attention.cost, 0.0),
        np.append(attention.kind, -1),
        np.append(attention.tokens, 0),
        attention.law.start_s,
        attention.law.call_s,
        attention.law.batches == "padded",
        step.places,
        attention.room(step.cluster.num_devices),
    )


def allowed(step: Step, home: Array) -> bool:
    return bool((np.bincount(home, minlength=step.cluster.num_devices) <= step.places).all())


def all_homes(step: Step) -> list[Array]:
    every = itertools.product(range(step.cluster.num_devices), repeat=len(step.copies))
    return [home for home in map(np.array, every) if allowed(step, home)]


@settings(max_examples=60)
@given(steps(), st.sampled_from(luffy.METHODS))
def test_the_objective_is_what_a_naive_count_of_attention_and_copies_gives(step: Step, method: str) -> None:
    found = rehome(step, method)
    assert found.dealt[0].objective.value == pytest.approx(naive_seconds(step, found.device_of_sample), abs=1e-11)
    if method == "joint":
        assert allowed(step, found.device_of_sample)


@settings(max_examples=40, deadline=None)
@given(steps(largest=4))
def test_no_homes_beat_the_bound(step: Step) -> None:
    outcome = rehome(step).dealt[0]
    least = min(naive_seconds(step, home) for home in all_homes(step))
    assert known(outcome.bound) <= least * (1 + 1e-9) + 1e-11
    assert known(outcome.bound) > 0
    assert outcome.objective.value >= least * (1 - 1e-9) - 1e-11


@settings(max_examples=40)
@given(steps())
def test_the_weights_of_a_bound_prove_it_over_any_homes(step: Step) -> None:
    channels = Channels.of(step.cluster, BYTES)
    found = least_seconds(step.traffic, step.attention, step.places, channels)
    longest, homes = int(step.attention.cost.argmax()), [case.home for case in found.cases]
    assert homes in ([None], [*range(step.cluster.num_devices)])
    for case in found.cases:
        assert min(case.port_weights.min(), case.device_weights.min()) >= 0
        assert case.port_weights.sum(axis=(1, 2, 3)).max() <= 1 + 1e-9
        assert case.device_weights.sum() <= 1 + 1e-9
    rng = np.random.default_rng(0)
    slots = np.repeat(np.arange(step.cluster.num_devices), step.places)
    for _ in range(20):
        home = rng.permutation(slots)[: len(step.copies)]
        (case,) = [case for case in found.cases if case.home in (None, home[longest])]
        assert found.seconds <= case.seconds <= naive_seconds(step, home) * (1 + 1e-9) + 1e-11


@pytest.mark.parametrize("batches", ["packed", "padded"])
def test_the_longest_sample_is_on_one_device_though_shares_of_it_would_be_faster_on_all(batches: Any) -> None:
    """It has as many copies with each of two devices; halves of it on both would halve what a port passes."""
    law, million = luffy.Law(0.0, 1e-9, 1e-12, batches, "free"), 10**6
    step = Step(
        np.array([[million, million], [1, 0], [0, 1]]),
        None,
        luffy.Attention(law, tokens := np.array([100, 1, 1]), tokens**2),
        Cluster(1, 2, LINKS),
    )
    channels, value = Channels.of(step.cluster, BYTES), rehome(step, bounded=False).dealt[0].objective.value
    (anywhere,) = least_seconds(step.traffic, step.attention, step.places, channels, value=0.0).cases
    each = least_seconds(step.traffic, step.attention, step.places, channels, value=value)
    assert [case.home for case in each.cases] == [0, 1]
    assert anywhere.seconds < 0.6 * value
    assert each.seconds == pytest.approx(value, rel=1e-3)


@settings(max_examples=10)
@given(steps())
def test_a_programme_too_large_leaves_a_bound_that_equal_weights_prove(step: Step) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound, "MOST_CELLS", 0)
        found = least_seconds(step.traffic, step.attention, step.places, Channels.of(step.cluster, BYTES))
    assert all(len({*case.port_weights.ravel().tolist()}) == 1 for case in found.cases)
    alone = least_attention(step.attention, step.places) + step.attention.start_s + step.attention.call_s
    assert found.seconds >= alone * (1 - 1e-9), "attention counts as much as it takes alone"
    assert 0 < found.seconds <= rehome(step, bounded=False).dealt[0].objective.value * (1 + 1e-9) + 1e-11


@settings(max_examples=50)
@given(steps())
def test_no_move_and_no_swap_within_the_room_shortens_what_joint_reaches(step: Step) -> None:
    found = rehome(step, bounded=False)
    home, least = found.device_of_sample, found.dealt[0].objective.value * (1 - 1e-8) - 1e-11
    room, before = step.attention.room(step.cluster.num_devices), naive_tokens(step, home)
    for i in range(len(home)):
        neighbours = [np.where(np.arange(len(home)) == i, d, home) for d in range(step.cluster.num_devices)]
        for j in range(i):
            swapped = home.copy()
            swapped[[i, j]] = home[[j, i]]
            neighbours.append(swapped)
        for other in filter(lambda one: allowed(step, one), neighbours):
            if all(now <= max(room, old) for now, old in zip(naive_tokens(step, other), before, strict=True)):
                assert naive_seconds(step, other) >= least


@settings(max_examples=50)
@given(steps(largest=12), st.integers(0, 2**32))
def test_the_time_of_moves_and_swaps_is_that_of_their_homes(step: Step, seed: int) -> None:
    size, attention, channels = step.cluster.num_devices, step.attention, Channels.of(step.cluster, BYTES)
    slots = np.repeat(np.arange(size), step.places)
    before = np.random.default_rng(seed).permutation(slots)[: len(step.copies)]
    rows, group, held = rows_of(step.traffic), step.cluster.devices_per_node, held_of(step)
    time, after = shorten(rows, before[None].copy(), group, channels.alpha, channels.beta, held)
    assert time == pytest.approx(naive_seconds(step, after), abs=1e-11)
    assert naive_seconds(step, after) <= naive_seconds(step, before) * (1 + 1e-9) + 1e-11
    assert allowed(step, after)
    room = attention.room(size)
    kept = zip(naive_tokens(step, after), naive_tokens(step, before), strict=True)
    assert all(now <= max(room, max(naive_tokens(step, before))) for now, _ in kept)


@settings(max_examples=40, deadline=None)
@given(steps(largest=12), st.integers(0, 2**32))
def test_kicks_never_lengthen_the_best_descent_and_are_the_same_again(step: Step, seed: int) -> None:
    channels, held, rows = Channels.of(step.cluster, BYTES), held_of(step), rows_of(step.traffic)
    problem = step.cluster.devices_per_node, channels.alpha, channels.beta, held
    slots = np.repeat(np.arange(step.cluster.num_devices), step.places)
    rng = np.random.default_rng(seed)
    starts = np.array([rng.permutation(slots)[: len(step.copies)] for _ in range(2)])
    before, state = starts.copy(), state_of(rows, starts[0], *problem)
    descents = [_descended(state, device, placed(state, device)) for device in starts.copy()]
    (time, home), (again, homes) = (shorten(rows, starts, *problem) for _ in range(2))
    assert time <= min(descents)
    assert (time, home.tolist(), starts.tolist()) == (again, homes.tolist(), before.tolist())


def test_kicks_reach_the_least_of_all_homes_more_often_than_descents_do() -> None:
    cluster, rng, kicked, descended = Cluster(2, 2, LINKS), np.random.default_rng(0), 0, 0
    for _ in range(30):
        tokens = rng.integers(1, 600, 7)
        copies = rng.integers(0, 2 * tokens[:, None] + 1, (7, 4))
        step = Step(copies, None, luffy.Attention(luffy.Law(0.0, 71e-9, 1e-10), tokens, tokens**2), cluster)
        channels, start = Channels.of(cluster, BYTES), np.arange(7) % 4
        problem = 2, channels.alpha, channels.beta, held_of(step)
        state, rows = state_of(rows_of(step.traffic), start, *problem), rows_of(step.traffic)
        least = min(naive_seconds(step, home) for home in all_homes(step)) * (1 + 1e-9)
        descended += _descended(state, start.copy(), placed(state, start)) <= least
        kicked += shorten(rows, start[None].copy(), *problem)[0] <= least
    assert kicked > descended


@settings(max_examples=40, deadline=None)
@given(steps(largest=12), st.integers(1, 2**31 - 1), st.integers(0, 2**32))
def test_a_kick_keeps_numbers_and_the_room_and_counts_what_it_leaves(step: Step, drawn: int, seed: int) -> None:
    channels, held, size = Channels.of(step.cluster, BYTES), held_of(step), step.cluster.num_devices
    slots = np.repeat(np.arange(size), step.places)
    device = np.random.default_rng(seed).permutation(slots)[: len(step.copies)]
    state = state_of(rows_of(step.traffic), device, step.cluster.devices_per_node, channels.alpha, channels.beta, held)
    before, full = device.copy(), np.maximum(naive_tokens(step, device), step.attention.room(size))
    placed(state, device)
    time, _ = _kicked(state, device, drawn)
    assert time == pytest.approx(naive_seconds(step, device), abs=1e-11)
    assert np.bincount(device, minlength=size).tolist() == np.bincount(before, minlength=size).tolist()
    assert (device != before).sum() <= 2 * PAIRS
    assert (naive_tokens(step, device) <= full).all()


@settings(max_examples=60, deadline=None)
@given(steps(largest=5))
def test_the_least_attention_is_no_more_than_that_of_any_homes(step: Step) -> None:
    first_s = step.attention.start_s + step.attention.call_s
    least = min(naive_attention(step, home) for home in all_homes(step))
    assert least_attention(step.attention, step.places) + first_s <= least * (1 + 1e-9) + 1e-11


@pytest.mark.parametrize(
    ("costs", "free", "least"), [([9, 5, 4, 2], False, 11), ([5, 5, 4], True, 9), ([9, 1], True, 9)]
)
def test_the_longest_sample_shares_its_device_where_places_or_devices_are_few(
    costs: list[int], free: bool, least: int
) -> None:
    law = luffy.Law(0.0, 2.0**-40, 0.0, numbers="free" if free else "equal")
    attention = luffy.Attention(law, np.array(costs), np.zeros(len(costs), np.int64))
    assert least_attention(attention, attention.places(2)) == least * 2.0**-40


@settings(max_examples=60, deadline=None)
@given(steps(largest=12), st.integers(0, 2**32))
def test_what_exchanges_change_is_what_counting_every_sample_anew_gives(step: Step, seed: int) -> None:
    rng, held, none = np.random.default_rng(seed), held_of(step), len(step.copies)
    channels, group = Channels.of(step.cluster, BYTES), step.cluster.devices_per_node
    device = rng.integers(0, step.cluster.num_devices, none)
    stepped, counted = (
        state_of(rows_of(step.traffic), device, group, channels.alpha, channels.beta, held) for _ in range(2)
    )
    placed(stepped, device)
    for _ in range(8):
        i = int(rng.integers(none))
        others = [(j, device[j]) for j in range(none)] + [(none, d) for d in range(step.cluster.num_devices)]
        others = [(j, d) for j, d in others if d != device[i]]
        if others:
            exchange(stepped, device, i, *others[rng.integers(len(others))])
        placed(counted, device)
        for one, other in ((stepped.ports, counted.ports), (stepped.on, counted.on)):
            assert all(np.array_equal(now, anew) for now, anew in zip(one, other, strict=True))
    assert naive_seconds(step, device) == pytest.approx(time_of(stepped), abs=1e-11)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 3), st.booleans())
def test_the_padded_optimum_is_the_least_of_all_batches(costs: list[int], devices: int, free: bool) -> None:
    places = np.full(devices, len(costs) if free else -(-len(costs) // devices))
    value, batch = padded_optimum(np.array(costs, float), places)

    def padded(of: tuple[int, ...]) -> int:
        groups = [[cost for cost, at in zip(costs, of, strict=True) if at == d] for d in range(devices)]
        return max(len(group) * max(group, default=0) for group in groups)

    every = itertools.product(range(devices), repeat=len(costs))
    assert value == min(padded(of) for of in every if max(map(of.count, of)) <= places[0])
    assert padded(tuple(batch.tolist())) == value


def test_growth_goes_where_the_padded_batch_grows_least_among_the_nearest() -> None:
    """Lengths 6 and 6 on one device, 11 on another: a sample of 11 grows 63 d^2 + 582 d there, 63 d^2 + 482 d here."""
    law = luffy.Law(0.0, 1e-3, 1e-6, "padded", candidates=2)
    tokens = np.array([11, 6, 6, 1])
    units = np.array([[9, 0, 0], [0, 9, 0], [0, 9, 0], [0, 8, 9]])
    home = growth(units, luffy.Attention(law, tokens, tokens**2), 3)
    assert home.tolist()[:2] == [0, 1]
    assert home[3] == 2  # an empty device among the two nearest grows by 1, the one with 6 by 6


def test_a_tight_room_sends_growth_to_any_device_that_fits() -> None:
    law, tokens = luffy.Law(0.0, 1e-3, 0.0, "padded", room=1.0, candidates=1), np.array([4, 4])
    units = np.array([[9, 0], [9, 0]])
    assert sorted(growth(units, luffy.Attention(law, tokens, tokens**2), 2).tolist()) == [0, 1]


def test_joint_trades_copies_for_attention_where_samples_are_long() -> None:
    cluster = Cluster(2, 1, {"inter": LINKS["inter"]})
    tokens, copies = np.array([900, 800, 10, 10]), np.array([[90, 0], [80, 0], [0, 1], [0, 1]])
    law = luffy.Law(0.0, 1e-6, 1e-9)
    homes = [
        luffy.rehome("joint", copies, tokens, cluster, attention, copy_bytes=BYTES).device_of_sample
        for attention in (luffy.Attention(law, tokens, tokens**2, follows) for follows in (True, False))
    ]
    assert homes[0][0] != homes[0][1]
    assert homes[1][0] == homes[1][1] == 0


@settings(max_examples=20)
@given(st.floats(0, 1e-3), st.floats(0, 1e-3), st.floats(0, 1e-6), st.floats(1e-12, 1e-9), st.integers(0, 2**32))
def test_the_law_of_a_curve_that_is_one_is_that_one(
    start: float, call: float, token: float, square: float, seed: int
) -> None:
    from moeplan.profilers.fits.fit import Prediction

    def curve(batch: Array, length: Array, calls: Array) -> Prediction:
        t = start + call * calls + batch * (token * length + square * length**2)
        return Prediction(t, t, t, np.zeros(t.shape, bool))

    law = luffy.law_of(curve, np.random.default_rng(seed).integers(8, 2000, 30))
    batch, length, calls = np.array([1.0, 7.0, 7.0]), np.array([300.0, 40.0, 40.0]), np.array([1.0, 1.0, 5.0])
    found = law.start_s + law.call_s * calls + batch * (law.token_s * length + law.square_s * length**2)
    np.testing.assert_allclose(found, curve(batch, length, calls).seconds, rtol=1e-6, atol=8e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        (0.0, -1.0, 1e-9, 0.0),
        (-1.0, 0.0, 1e-9, 0.0),
        (1.0, 0.0, 0.0, 0.0),
        (0.0, 0.0, float("nan"), 1e-9),
        (0.0, 0.0, float("inf"), 0.0),
    ],
)
def test_laws_that_are_none_are_refused(wrong: tuple[float, float, float, float]) -> None:
    start_s, call_s, token_s, square_s = wrong
    with pytest.raises(ValueError, match="expected none negative"):
        luffy.Law(call_s, token_s, square_s, start_s=start_s)


def test_a_device_with_samples_pays_its_start_once_and_a_call_for_each_length() -> None:
    tokens = np.array([5, 5, 9])
    law = luffy.Law(1e-4, 1e-6, 1e-9, numbers="free", start_s=1e-3)
    attention = luffy.Attention(law, tokens, tokens**2)
    own = law.token_s * tokens + law.square_s * tokens**2
    seconds = attention.seconds(np.array([0, 0, 0]), 3)
    assert seconds == pytest.approx([1e-3 + 2e-4 + own.sum(), 0, 0], abs=1e-11)
    assert attention.seconds(np.array([0, 1, 2]), 3) == pytest.approx(1e-3 + 1e-4 + own, abs=1e-11)
    assert luffy.Attention(law, tokens, tokens**2, follows=False).seconds(np.array([0, 1, 2]), 3).tolist() == [0, 0, 0]


@settings(max_examples=30)
@given(steps(largest=12))
def test_the_first_start_is_netmoe_s_even_homes(step: Step) -> None:
    pairs, group = step.copies.sum(axis=1), step.cluster.devices_per_node
    even = netmoe.rehome("even", step.copies, pairs, step.cluster, next_copies=step.following, bounded=False)
    assert _even(step.traffic.units, pairs, group).tolist() == even.device_of_sample.tolist()
