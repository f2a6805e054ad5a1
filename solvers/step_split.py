"""Replicas chosen by the counts of a step, for tokens that are at home before every layer.

`quota` and `lp` split the token-expert pairs of a layer and step so that the busiest device holds as little as can be,
as `quota.least` says. `quota` then keeps as many as can be on their own device, else on their own node: every rank
knows what every source sends. `lp` does not go by sources: its ranks know the sums alone, and a token takes a replica
in proportion to what each is to serve. SGLang's LP dispatch draws them, so that its loads are these up to chance; here
tokens take turns. In loads the two rules are alike, in copies they are not.

Where placements change between steps, two rules more are told apart by pairs: `even`, each source's tokens of an expert
going round its holders, and `capacity`, FlexMoE's Algorithm 3.

To be imported in the call that needs it, as `quota` is.

Legend: B steps; M rows, parts of steps; L MoE layers; E experts; P slots; D devices; T tokens; K experts per token;
Q queues of an expert's tokens: one a source, or one in all; R periods, in each of which the placement is one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .arrays import Floats, Ints, flow_units
from .compiled import compiled
from .placement import DEALS, Placement
from .quota import FAR, Holders, holders_of, least, nearest, split

QUOTA, EVEN, CAPACITY = range(3)  # in `DEALS`


class StepSplit:
    """The split of every step and layer, dealt out token by token.

    Parameters
    ----------
    holders
        Who holds what in each period and layer, `[R][L]`, on nodes of devices; by `lp` on one node.
    rule
        `quota`, `lp`, `even` or `capacity`.
    pairs
        Token-expert pairs of every step, `[B, L, E, D]`, by the device that their token is on.
    ratio
        What a pair that crosses nodes costs of one that crosses devices.
    period
        Of each step, `[B]`; None: there is one.
    """

    def __init__(
        self,
        holders: Sequence[Sequence[Holders]],
        rule: str,
        pairs: NDArray[np.int32],
        ratio: int,
        period: Ints | None = None,
    ) -> None:
        num_steps, num_layers, num_experts, num_devices = pairs.shape
        self.by_source = rule != "lp"
        self._period = np.zeros(num_steps, np.int64) if period is None else period
        num_slots = max(len(of.device) for layers in holders for of in layers)
        self._first = np.zeros((num_layers, len(holders), num_experts + 1), np.int64)
        self._device = np.zeros((num_layers, len(holders), num_slots), np.int64)
        for number, layers in enumerate(holders):
            for layer, of in enumerate(layers):
                self._first[layer, number], self._device[layer, number, : len(of.device)] = of.first, of.device
        shape = (num_steps, num_layers, num_slots, num_devices if self.by_source else 1)
        self._dealt, self._given = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for step, layer in np.ndindex(num_steps, num_layers):
            of, of_layer = holders[int(self._period[step])][layer], pairs[step, layer].astype(np.int64)
            if self.by_source:
                self._dealt[step, layer, : len(of.device)] = dealt(of_layer, of, DEALS.index(rule), ratio)
            else:
                self._dealt[step, layer, : len(of.device), 0] = served(of_layer.sum(axis=1), of)

    def choose(
        self, layer: int, ids: NDArray[np.integer], home: NDArray[np.integer], step: NDArray[np.integer]
    ) -> NDArray[np.int32]:
        """The device of every routed cell, int32 `[T, K]`, -1 where `ids` names no expert; the next tokens of a step.

        Those of an expert and queue take turns as `quota.in_turn` says, so that any part of a step is split alike.
        """
        queue = np.asarray(home if self.by_source else np.zeros_like(home), np.int64)
        device = np.full(ids.shape, -1, np.int32)
        of_layer = self._dealt[:, layer], self._given[:, layer], self._first[layer], self._device[layer]
        take_turns(ids.astype(np.int64), queue, step.astype(np.int64), self._period, *of_layer, device)
        return device


def layer_holders(placement: Placement, group: int) -> list[Holders]:
    """Who holds what in every layer; a node of `group` devices."""
    rows = placement.physical_to_logical
    return [holders_of(row_P, placement.slots, placement.num_experts, group) for row_P in rows]


@compiled
def even_deal(pairs: Ints, holders: Holders) -> Ints:
    """What every slot serves of every source `[P, D]` when each source goes round an expert's holders in turn.

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
    """What every slot serves of every source `[P, D]` by FlexMoE's Algorithm 3: even capacities, own device first.

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


@compiled
def proportional_deal(pairs: Ints, served: Ints, holders: Holders) -> Ints:
    """What every slot serves of every source `[P, D]`, each source's tokens in proportion to what slots serve `[P]`."""
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
    """What every slot serves of every source `[P, D]` of pairs `[E, D]` by the rule of this number in `DEALS`."""
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


@compiled
def traffic_of_steps(pairs: Ints, holders: Holders, rule: int, ratio: int) -> tuple[Ints, Ints, Ints]:
    """Loads of devices `[B, D]`, their ports as `pair_ports` `[B, 2, 2, D]`, and pairs that stay there `[B, D]`.

    Of one layer's steps, pairs `[B, E, D]`, under one placement.
    """
    num_steps, _, num_devices = pairs.shape
    loads, kept = np.zeros((num_steps, num_devices), np.int64), np.zeros((num_steps, num_devices), np.int64)
    ports = np.zeros((num_steps, 2, 2, num_devices), np.int64)
    for b in range(num_steps):
        shares = dealt(pairs[b], holders, rule, ratio)
        ports[b] = pair_ports(shares, holders)
        for p in range(len(shares)):
            loads[b, holders.device[p]] += shares[p].sum()
            kept[b, holders.device[p]] += shares[p, holders.device[p]]
    return loads, ports, kept


@compiled
def served(total: Ints, holders: Holders) -> Ints:
    """What every slot serves `[P]` of each expert's pairs `[E]`, wherever they come from."""
    most, _, _ = least(total, holders)
    nowhere = np.zeros((len(total), len(holders.held_first) - 1), np.int64)
    return nearest(nowhere, total, holders, most, 1)


def split_loads(loads: Ints, step: Ints, holders: Holders) -> Floats:
    """Loads of devices `[M, D]` where rows of loads of experts `[M, E]` are split as their step `[M]` is."""
    num_devices = len(holders.held_first) - 1
    load_MD = np.zeros((len(loads), num_devices))
    to_device_PD = np.eye(num_devices)[holders.device]
    for rows in np.split(np.arange(len(step)), np.flatnonzero(np.diff(step)) + 1):
        total = loads[rows].sum(axis=0)
        share_P = served(total, holders) / np.maximum(total, 1)[holders.expert]
        load_MD[rows] = loads[rows][:, holders.expert] @ (share_P[:, None] * to_device_PD)
    return load_MD


def split_ratios(loads: Floats, placement: Placement) -> Floats:
    """Max/mean device load of every step and layer `[B, L]` for loads `[B, L, E]`; 1 without load."""
    units, scale = flow_units(loads)
    alive, ratios = np.count_nonzero(placement.slots), np.ones(loads.shape[:2])
    for layer, holders in enumerate(layer_holders(placement, placement.num_devices)):
        mean_B = loads[:, layer].sum(axis=1) / alive
        most_B = least_of_steps(np.ascontiguousarray(units[:, layer]), holders) / scale
        ratios[:, layer] = np.divide(most_B, mean_B, out=np.ones(len(mean_B)), where=mean_B > 0)
    return ratios


@compiled
def least_of_steps(loads: Ints, holders: Holders) -> Ints:
    """The busiest device's load in every step, `[B]`, of loads `[B, E]`."""
    most = np.empty(len(loads), np.int64)
    for b in range(len(loads)):
        most[b] = least(loads[b], holders)[0]
    return most


@compiled
def take_turns(
    ids: Ints,
    queue: Ints,
    step: Ints,
    period: Ints,
    dealt: NDArray[np.int32],
    given: NDArray[np.int32],
    first: Ints,
    device: Ints,
    chosen: NDArray[np.int32],
) -> None:
    """Write the device of every cell `[T, K]`, the one of its expert's slots that is furthest behind its share.

    Parameters
    ----------
    queue, step
        Of every token, `[T]`.
    period
        Of every step, `[B]`.
    dealt, given
        What every slot is to serve of each queue in all, and has served so far, `[B, P, Q]`.
    first, device
        The slots of each expert, and their devices, as in `Holders`, in each period `[R, E + 1]`, `[R, P]`.
    """
    for t in range(ids.shape[0]):
        b, q = step[t], queue[t]
        r = period[b]
        for k in range(ids.shape[1]):
            e = ids[t, k]
            if e >= first.shape[1] - 1:
                continue
            start, end = first[r, e], first[r, e + 1]
            if end - start == 1:
                chosen[t, k] = device[r, start]
                continue
            n, i = np.int64(0), np.int64(1)
            for p in range(start, end):
                n += dealt[b, p, q]
                i += given[b, p, q]
            best, most = start, -FAR
            for p in range(start, end):
                behind = dealt[b, p, q] * i - n * given[b, p, q]
                if behind > most:
                    best, most = p, behind
            given[b, best, q] += 1
            chosen[t, k] = device[r, best]
