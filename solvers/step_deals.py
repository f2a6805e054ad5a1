"""Pairs that each replica serves of each source in a step, rule by rule, and the ports that it goes through; compiled.

Beside `quota` and `lp` (`step_split`), where placements change between steps, two rules more are told apart by pairs:
`even`, each source's tokens of an expert going round its holders, and `capacity`, FlexMoE's Algorithm 3.

To be imported in the call that needs it.

Legend: B steps; E experts; P slots; D devices.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from .arrays import Ints
from .compiled import compiled
from .quota import Holders, least, nearest, split

QUOTA, EVEN, CAPACITY = range(3)  # in `DEALS`


@compiled
def even_deal(pairs: Ints, holders: Holders) -> Ints:
    """Pairs by slot and source `[P, D]` when each source goes round an expert's holders in turn.

    Source g begins with holder g, so that what does not divide is spread.
    """
    first = holders.first
    dealt = np.empty((len(holders.device), pairs.shape[1]), np.int64)
    for e in range(len(pairs)):
        n = first[e + 1] - first[e]
        for g in range(pairs.shape[1]):
            for i in range(n):
                dealt[first[e] + i, g] = (pairs[e, g] + n - 1 - (i - g) % n) // n
    return dealt


@compiled
def capacity_deal(pairs: Ints, holders: Holders) -> Ints:
    """Pairs by slot and source `[P, D]` by FlexMoE's Algorithm 3: even capacities, own device first.

    The others' tokens go to what is left of the capacities in proportion.
    """
    first, device = holders.first, holders.device
    dealt = np.zeros((len(device), pairs.shape[1]), np.int64)
    for e in range(len(pairs)):
        a, n = first[e], first[e + 1] - first[e]
        total, left = pairs[e].sum(), np.empty(n, np.int64)
        for i in range(n):
            left[i] = (total + n - 1 - i) // n
            own = min(left[i], pairs[e, device[a + i]])
            dealt[a + i, device[a + i]] = own
            left[i] -= own
        room = left.sum()
        for g in range(pairs.shape[1]):
            rest = pairs[e, g]
            for i in range(n):
                if device[a + i] == g:
                    rest -= dealt[a + i, g]
            before, given = 0, 0
            for i in range(n if rest > 0 else 0):  # rounded along the holders: never more than a holder has left
                before += left[i]
                some = before * rest // room - given
                given += some
                dealt[a + i, g] += some
                left[i] -= some
            room -= max(rest, 0)
    return dealt


ALONE = {EVEN: even_deal, CAPACITY: capacity_deal}  # rules that are no flow


@compiled
def proportional_deal(pairs: Ints, served: Ints, holders: Holders) -> Ints:
    """Pairs by slot and source `[P, D]`, each source's tokens in proportion to what slots serve `[P]`."""
    first = holders.first
    dealt = np.zeros((len(served), pairs.shape[1]), np.int64)
    for e in range(len(pairs)):
        total = max(pairs[e].sum(), 1)
        for g in range(pairs.shape[1]):
            before, given = 0, 0
            for p in range(first[e], first[e + 1]):  # rounded along the holders
                before += served[p]
                dealt[p, g] = before * pairs[e, g] // total - given
                given += dealt[p, g]
    return dealt


@compiled
def dealt(pairs: Ints, holders: Holders, rule: int, ratio: int) -> Ints:
    """Pairs by slot and source `[P, D]` of pairs `[E, D]` by the rule of this number in `DEALS`."""
    if rule == QUOTA:
        return split(pairs, holders, ratio)[0]
    if rule == EVEN:
        return even_deal(pairs, holders)
    if rule == CAPACITY:
        return capacity_deal(pairs, holders)
    return proportional_deal(pairs, served(pairs.sum(axis=1), holders), holders)


@compiled
def pair_ports(dealt: Ints, holders: Holders) -> Ints:
    """Pairs through every port, inside nodes (0) and between nodes (1), sent (0) and received (1): `[2, 2, D]`."""
    num_slots, num_devices = dealt.shape
    device, group = holders.device, holders.devices_per_node
    ports = np.zeros((2, 2, num_devices), np.int64)
    for p in range(num_slots):
        d = device[p]
        node = d // group
        for g in range(num_devices):
            if g != d and dealt[p, g] > 0:
                far = 0 if g // group == node else 1
                ports[far, 0, g] += dealt[p, g]
                ports[far, 1, d] += dealt[p, g]
    return ports


def deal_of(rule: int, ratio: int) -> Callable[[Ints, Holders], Ints]:
    """The deal of one rule: `dealt`, which compiles all rules for a minute, only where one alone does not do."""
    return ALONE.get(rule, partial(dealt, rule=rule, ratio=ratio))


def traffic_of_steps(pairs: Ints, holders: Holders, rule: int, ratio: int) -> tuple[Ints, Ints, Ints]:
    """Loads of devices `[B, D]`, their ports as `pair_ports` `[B, 2, 2, D]`, and pairs that stay there `[B, D]`.

    Of one layer's steps, pairs `[B, E, D]`, under one placement.
    """
    num_steps, _, num_devices = pairs.shape
    loads, kept = np.zeros((num_steps, num_devices), np.int64), np.zeros((num_steps, num_devices), np.int64)
    ports, deal = np.zeros((num_steps, 2, 2, num_devices), np.int64), deal_of(rule, ratio)
    for b in range(num_steps):
        shares = deal(pairs[b], holders)
        ports[b] = pair_ports(shares, holders)
        np.add.at(loads[b], holders.device, shares.sum(axis=1))
        np.add.at(kept[b], holders.device, shares[np.arange(len(shares)), holders.device])
    return loads, ports, kept


@compiled
def served(total: Ints, holders: Holders) -> Ints:
    """Pairs by slot `[P]` of each expert's `[E]`, wherever they come from."""
    most, _, _ = least(total, holders)
    nowhere = np.zeros((len(total), len(holders.held_first) - 1), np.int64)
    return nearest(nowhere, total, holders, most, 1)
