import contextlib
import dis
import itertools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from moeplan.solvers import quota
from moeplan.solvers.flexmoe import state
from moeplan.solvers.quota import Holders, holders_of

Array = NDArray[Any]


@st.composite
def layers(draw: st.DrawFn) -> tuple[Array, list[list[int]], int]:
    """Pairs by expert and source; the experts of every device; devices a node."""
    group, num_nodes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_experts, num_devices = draw(st.integers(1, 6)), group * num_nodes
    homes = draw(st.lists(st.integers(0, num_devices - 1), min_size=num_experts, max_size=num_experts))
    more = st.sets(st.integers(0, num_experts - 1), max_size=3)
    held = [sorted(draw(more) | {e for e, home in enumerate(homes) if home == d}) for d in range(num_devices)]
    sizes = st.integers(0, 3) | st.integers(0, 1000)
    size = num_experts * num_devices
    pairs = np.array(draw(st.lists(sizes, min_size=size, max_size=size))).reshape(num_experts, num_devices)
    return pairs, held, group


def layer_of(held: list[list[int]], num_experts: int, group: int) -> Holders:
    return holders_of(np.array(list(itertools.chain(*held)), np.int64), np.array([*map(len, held)]), num_experts, group)


def sorted_holders(experts: Array, slots: Array, num_experts: int, group: int) -> Holders:
    """Who holds what, by sorting."""
    device_P = np.repeat(np.arange(len(slots)), slots)
    order = np.lexsort((device_P, experts))
    expert, device = experts[order].astype(np.int64), device_P[order].astype(np.int64)
    node = device // group
    new = np.append(True, (np.diff(expert) != 0) | (np.diff(node) != 0))[: len(order)]
    cell, starts = np.cumsum(new) - 1, np.flatnonzero(new)
    first = np.searchsorted(expert, np.arange(num_experts + 1))
    cells_at, experts_at = len(slots), len(slots) + len(starts)
    lower = np.concatenate([device, cells_at + np.arange(len(starts))])  # where an item's pairs come from
    upper = np.concatenate([cells_at + cell, experts_at + expert[starts]])
    shared = np.flatnonzero(np.diff(first)[np.concatenate([expert, expert[starts]])] > 1)
    tail = np.concatenate([lower[shared], upper[shared]])
    arcs = np.argsort(tail, kind="stable")
    place = np.argsort(arcs)  # of an arc among the sorted ones
    less, more = np.full((2, len(lower)), -1)
    less[shared], more[shared] = place[: len(shared)], place[len(shared) :]
    return Holders(
        first=first,
        device=device,
        expert=expert,
        cell=cell,
        cell_first=np.append(starts, len(order)),
        expert_first=np.searchsorted(expert[starts], np.arange(num_experts + 1)),
        held=np.argsort(device, kind="stable"),
        held_first=np.searchsorted(np.sort(device), np.arange(len(slots) + 1)),
        node=node[starts],
        devices_per_node=group,
        column=order,
        start=np.searchsorted(tail[arcs], np.arange(experts_at + num_experts + 1)),
        end=np.concatenate([upper[shared], lower[shared]])[arcs],
        item=np.concatenate([shared, shared])[arcs],
        less=less,
        more=more,
    )


@given(layers())
def test_holders_are_those_that_sorting_finds(layer: tuple[Array, list[list[int]], int]) -> None:
    pairs, held, group = layer
    experts, slots = np.array(list(itertools.chain(*held)), np.int64), np.array([*map(len, held)])
    found = holders_of(experts, slots, len(pairs), group)
    expected = sorted_holders(experts, slots, len(pairs), group)
    for name in Holders._fields:
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def programmes(pairs: Array, held: list[list[int]], group: int, ratio: int) -> tuple[int, float]:
    """The least load and the least traffic under it, by two linear programmes over every source, slot and expert."""
    routes = [(e, g, d) for d, experts in enumerate(held) for e in experts for g in range(pairs.shape[1])]
    served = np.zeros((pairs.size, len(routes) + 1))
    load = np.zeros((len(held), len(routes) + 1))
    for i, (e, g, d) in enumerate(routes):
        served[e * pairs.shape[1] + g, i] = load[d, i] = 1
    load[:, -1] = -1
    most_only = np.append(np.zeros(len(routes)), 1)
    most = linprog(most_only, load, np.zeros(len(held)), served, pairs.ravel()).fun
    whole = int(np.ceil(most - 1e-6))
    price = [0 if g == d else 1 if g // group == d // group else ratio for _, g, d in routes]
    limits = [(0, None)] * len(routes) + [(whole, whole)]
    return whole, linprog([*price, 0], load, np.zeros(len(held)), served, pairs.ravel(), limits).fun


def traffic(dealt: Array, holders: Holders, group: int, ratio: int) -> int:
    source_D = np.arange(dealt.shape[1])
    crosses_PD = holders.device[:, None] // group != source_D // group
    return int((dealt * np.where(holders.device[:, None] == source_D, 0, np.where(crosses_PD, ratio, 1))).sum())


@settings(max_examples=150, deadline=None)
@given(layers(), st.sampled_from([1, 2, 8]))
def test_split_is_that_of_the_linear_programmes(layer: tuple[Array, list[list[int]], int], ratio: int) -> None:
    pairs, held, group = layer
    holders = layer_of(held, len(pairs), group)
    dealt, most = quota.split(pairs, holders, ratio)
    assert (dealt >= 0).all()
    for e, of_expert in enumerate(pairs):  # nothing lost, nothing made
        assert dealt[holders.expert == e].sum(axis=0).tolist() == of_expert.tolist()
    load = np.bincount(holders.device, dealt.sum(axis=1), len(held))
    assert load.max() <= most
    least, cheapest = programmes(pairs, held, group, ratio)
    assert most == least
    assert traffic(dealt, holders, group, ratio) == pytest.approx(cheapest, abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(layers())
def test_bound_is_that_of_the_worst_set_of_experts(layer: tuple[Array, list[list[int]], int]) -> None:
    pairs, held, group = layer
    total = pairs.sum(axis=1)
    sets = itertools.chain.from_iterable(itertools.combinations(range(len(total)), n + 1) for n in range(len(total)))
    bounds = [-(-total[list(one)].sum() // sum(bool(set(one) & set(of)) for of in held)) for one in sets]
    most, proving, load = quota.least(total, layer_of(held, len(total), group))
    assert load.max(initial=0) <= most
    assert load.sum() == total.sum()
    assert most == max(bounds)
    within = [e for e in range(len(total)) if all(proving[d] for d, of in enumerate(held) if e in of)]
    assert most == -(-total[within].sum() // proving.sum())


def test_an_expert_goes_first_to_its_own_device_then_to_its_node() -> None:
    pairs = np.array([[4, 0, 6, 0], [6, 0, 4, 0]])
    dealt, most = quota.split(pairs, layer_of([[0, 1], [0, 1], [0, 1], [0, 1]], 2, 2), 8)
    assert most == 5
    slots = layer_of([[0, 1]] * 4, 2, 2)
    crossing = dealt[(slots.device // 2)[:, None] != np.arange(4) // 2]
    assert crossing.sum() == 0


@pytest.mark.parametrize("size", [(64, 16, 5), (256, 64, 6)])
def test_a_large_layer_is_split_whole(size: tuple[int, int, int]) -> None:
    num_experts, num_devices, slots = size
    rng = np.random.default_rng(0)
    held = [
        sorted({*range(d, num_experts, num_devices), *rng.choice(num_experts, slots - num_experts // num_devices)})
        for d in range(num_devices)
    ]
    share = rng.permutation(1 / np.arange(1, num_experts + 1) ** 1.26)
    pairs = rng.multinomial(4096, share / share.sum(), size=num_devices).T.copy()
    holders = layer_of(held, num_experts, 8)
    dealt, most = quota.split(pairs, holders, 8)
    load = np.bincount(holders.device, dealt.sum(axis=1), num_devices)
    assert load.sum() == pairs.sum()
    assert load.max() == most == quota.least(pairs.sum(axis=1), holders)[0]
    even = np.zeros(num_devices)
    for e in range(num_experts):
        at = holders.device[holders.expert == e]
        even[at] += pairs[e].sum() / len(at)
    assert most <= np.ceil(even.max())


@settings(max_examples=100, deadline=None)
@given(layers())
def test_pairs_take_turns_by_their_shares(layer: tuple[Array, list[list[int]], int]) -> None:
    pairs, held, group = layer
    holders = layer_of(held, len(pairs), group)
    dealt, _ = quota.split(pairs, holders, 8)
    first, device = quota.in_turn(dealt, holders)
    for e, g in itertools.product(*map(range, pairs.shape)):
        turns = device[first[e, g] : first[e, g] + pairs[e, g]]
        for p in np.flatnonzero(holders.expert == e):
            so_far = np.cumsum(turns == holders.device[p])
            assert (so_far[-1] if len(turns) else 0) == dealt[p, g]
            share = dealt[p, g] / max(pairs[e, g], 1) * np.arange(1, len(turns) + 1)
            assert (abs(so_far - share) <= len(held)).all()


@contextlib.contextmanager
def watched(*modules: ModuleType) -> Iterator[dict[str, set[str]]]:
    """Names that ever were floating point, and divisions, by function that was called; nothing is compiled."""
    found: dict[str, set[str]] = {}

    def see(frame: Any, event: str, _value: object) -> Any:
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") in {one.__name__ for one in modules}:
            if name not in found:
                found[name] = {one.argrepr for one in dis.get_instructions(frame.f_code) if one.argrepr in ("/", "/=")}
            kinds = {local: getattr(value, "dtype", type(value)) for local, value in frame.f_locals.items()}
            found[name] |= {local for local, kind in kinds.items() if kind in (float, np.float32, np.float64)}
        return see

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, one in [*vars(module).items()]:
                if hasattr(one, "py_func"):
                    patch.setattr(module, name, one.py_func)
        sys.settrace(see)
        try:
            yield found
        finally:
            sys.settrace(None)


def test_ranks_with_other_cpus_find_the_same_split_and_owners_as_nothing_in_them_is_floating_point() -> None:
    rng = np.random.default_rng(0)
    held = [sorted({*rng.permutation(8)[:4].tolist(), 2 * d, 2 * d + 1}) for d in range(4)]
    table = np.array([[*row, -1, -1, -1][:6] for row in held])
    files = [sys.modules[f"{quota.__name__}.{name}"] for name in ("holders", "loads", "traffic", "turns")]
    with watched(quota, *files, state) as found, np.errstate(over="ignore"):  # of the last level, which has no next
        holders = state.holders_in(table, 8, 2)
        dealt, _ = quota.split(rng.integers(0, 99, (8, 4)), holders, 8)
        quota.in_turn(np.ascontiguousarray(dealt[:, :1]), holders)
        state.homes_after(np.arange(8) % 4, state.holds(table, 8), 2)
    assert {"split", "in_turn", "in_cells", "least", "nearest", "homes_after", "holds"} < set(found)
    assert not any(found.values()), found
    with watched(state) as found:  # what would be seen
        state.sum_ports(holders)
    assert found == {"sum_ports": {"/", "rows"}}
