"""The state of a search for homes: counts of ports and devices, and what the exchange of two samples changes; compiled.

Copies and costs are multiples of units whose sums are exact: loads to which what a step changes is added equal a count
of all samples to the bit.

Legend: I samples; D devices; N nodes; C link classes, inside nodes (0) and between them (1); X exchanges; G kinds of
samples; K ports of an exchange that are watched.
"""

from typing import NamedTuple

import numpy as np

from ..arrays import Floats, Ints
from ..compiled import compiled, inlined

WATCHED = 4  # ports of an exchange: with more, few more candidates are ruled out


class Held(NamedTuple):
    """Samples as devices hold them; each array has a last row for no sample, of cost and size 0 and kind -1.

    The attention of a device takes

        A_d = start + call calls_d + sum_{i on d} cost_i,       padded:  start + call + samples_d max_{i on d} cost_i

    with a call for each kind of sample on it; none where it holds no samples.
    """

    cost: Floats  #: Seconds of attention, `[I+1]`; all 0: attention does not count
    kind: Ints  #: Samples of one kind attend in one call, `[I+1]`
    size: Ints  #: Tokens, `[I+1]`
    #: start, call: seconds to start a device, beside its calls, and of each
    start: float
    call: float
    padded: bool  #: Whether a device's samples are padded to its longest
    places: Ints  #: The most samples that a device takes, `[D]`
    room: int  #: The most tokens, padding included


class Ports(NamedTuple):
    """Copies that samples send, and the ports as their homes load them.

    `rows[x, i, d]` are copies with device d, `home[x, c, i, d]` those that the sample sends over a link class if it is
    on device d. `load[x, end, c, d]` go through a port, at the samples' ends (0) or their experts' (1), as
    `ports.sample_copies` counts them. `busy[x, d]` are the seconds of a device's busiest port, `order[x, n]` a node's
    devices by these, the busiest first, and `nodes[x]` the three nodes of the busiest devices, -1 where there are
    fewer.
    """

    rows: Floats
    home: Floats
    load: Floats
    busy: Floats
    order: Ints
    nodes: Ints
    alpha: Floats
    beta: Floats


class Devices(NamedTuple):
    """Samples, tokens and attention of every device.

    `of_kind[d, g]` are its samples of a kind, `top[d]` its two largest costs, `longest[d]` its two largest sizes;
    `busiest` are the three devices whose attention takes longest, -1 where there are fewer.
    """

    held: Ints
    tokens: Ints
    spent: Floats
    of_kind: Ints
    calls: Ints
    top: Floats
    longest: Ints
    seconds: Floats
    busiest: Ints


class Watch(NamedTuple):
    """The busiest ports of every exchange, `[X, K]`, which rule most candidates out.

    Port k takes `level[x, k]` seconds, of which sample i takes `share[i, x, k]` if it is on a device d with
    `side[d, x, k]` 1, nothing where that is 0. Samples i and j of devices a and b, exchanged, change it by
    (side[b] - side[a]) (share[i] - share[j]).
    """

    level: Floats
    share: Floats
    side: Floats


class State(NamedTuple):
    """Counts that a search keeps; `placed` counts them from nothing, `exchange` only what a step changes."""

    ports: Ports
    on: Devices
    watch: Watch
    held: Held


@compiled
def state_of(rows: Floats, device: Ints, group: int, alpha: Floats, beta: Floats, held: Held) -> State:
    """A state that `placed` fills; arguments as `swaps.shorten` takes them."""
    num_exchanges, num_samples, num_devices = rows.shape[0], len(device), rows.shape[2]
    num_nodes = num_devices // group
    ports = Ports(
        rows,
        _homes(rows, group),
        np.zeros((num_exchanges, 2, 2, num_devices)),
        np.zeros((num_exchanges, num_devices)),
        np.zeros((num_exchanges, num_nodes, group), np.int64),
        np.zeros((num_exchanges, 3), np.int64),
        alpha,
        beta,
    )
    on = Devices(
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices),
        np.zeros((num_devices, max(held.kind.max() + 1, 1)), np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros((num_devices, 2)),
        np.zeros((num_devices, 2), np.int64),
        np.zeros(num_devices),
        np.zeros(3, np.int64),
    )
    shape = (num_exchanges, WATCHED)
    watch = Watch(np.zeros(shape), np.zeros((num_samples + 1, *shape)), np.zeros((num_devices, *shape)))
    return State(ports, on, watch, held)


@compiled
def _homes(rows: Floats, group: int) -> Floats:
    """`Ports.home`."""
    home = np.zeros((rows.shape[0], 2, rows.shape[1], rows.shape[2]))
    for x in range(len(rows)):
        for i in range(rows.shape[1]):
            total = rows[x, i].sum()
            for first in range(0, rows.shape[2], group):
                on_node = rows[x, i, first : first + group].sum()
                for d in range(first, first + group):
                    home[x, 0, i, d] = on_node - rows[x, i, d]
                    home[x, 1, i, d] = total - on_node
    return home


@compiled
def placed(state: State, device: Ints) -> float:
    """Fill everything for samples on these devices; the time."""
    ports, on, held, none = state.ports, state.on, state.held, len(device)
    group = ports.order.shape[2]
    ports.load[:] = 0.0
    on.held[:], on.tokens[:], on.calls[:], on.of_kind[:], on.spent[:] = 0, 0, 0, 0, 0.0
    for i in range(len(device)):
        here = device[i]
        for x in range(len(ports.rows)):
            for d in range(len(on.held)):
                if d != here:
                    link = 0 if d // group == here // group else 1
                    ports.load[x, 0, link, here] += ports.rows[x, i, d]
                    ports.load[x, 1, link, d] += ports.rows[x, i, d]
        _enter(on, held, here, i)
    for x in range(len(ports.rows)):
        for n in range(ports.order.shape[1]):
            ports.order[x, n] = np.arange(n * group, n * group + group)
            _arrange(ports, x, n)
        _rank(ports, x)
    for d in range(len(on.held)):
        _longest(on, held, d, device)
        on.seconds[d] = attention(on, held, d, none, none)
    _rank_devices(on)
    return time_of(state)


@inlined
def time_of(state: State) -> float:
    """The time of attention and exchanges."""
    time = state.on.seconds[state.on.busiest[0]]
    for x in range(len(state.ports.nodes)):
        time += state.ports.busy[x, state.ports.order[x, state.ports.nodes[x, 0], 0]]
    return float(time)


@compiled
def exchange(state: State, device: Ints, i: int, j: int, b: int) -> None:
    """Exchange sample i and j, of device b or none: only what that changes is counted anew."""
    ports, on, held, none = state.ports, state.on, state.held, len(device)
    a, group = device[i], ports.order.shape[2]
    same = a // group == b // group
    device[i] = b
    if j != none:
        device[j] = a
    for d, out, into in ((a, i, j), (b, j, i)):
        if out != none:
            _leave(on, held, d, out)
        if into != none:
            _enter(on, held, d, into)
        _longest(on, held, d, device)
        on.seconds[d] = attention(on, held, d, none, none)
        for x in range(len(ports.rows)):
            for c in range(2):
                ports.load[x, 0, c, d] += ports.home[x, c, into, d] - ports.home[x, c, out, d]
            first = d // group * group
            for e in range(first, first + group):
                change = ports.rows[x, out, e] - ports.rows[x, into, e]
                if not same:
                    ports.load[x, 1, 1, e] += change
                    ports.load[x, 1, 0, e] -= 0.0 if e == d else change
                elif e == d:
                    ports.load[x, 1, 0, e] += change
    _rank_devices(on)
    for x in range(len(ports.rows)):
        _arrange(ports, x, a // group)
        if not same:
            _arrange(ports, x, b // group)
        _rank(ports, x)


@inlined
def attention(on: Devices, held: Held, d: int, out: int, into: int) -> float:
    """Seconds of attention on device d once one sample went out and another came; either may be none."""
    none = len(held.cost) - 1
    samples = on.held[d] - (out != none) + (into != none)
    if held.padded:
        longest = on.top[d, 1] if out != none and held.cost[out] == on.top[d, 0] else on.top[d, 0]
        return float((held.start + held.call) * (samples > 0) + samples * max(longest, held.cost[into]))
    calls, left, came = on.calls[d], held.kind[out], held.kind[into]
    if left != came:
        calls -= left >= 0 and on.of_kind[d, left] == 1
        calls += came >= 0 and on.of_kind[d, came] == 0
    return float(held.start * (samples > 0) + held.call * calls + (on.spent[d] - held.cost[out] + held.cost[into]))


@compiled
def _enter(on: Devices, held: Held, d: int, i: int) -> None:
    on.held[d] += 1
    on.tokens[d] += held.size[i]
    on.spent[d] += held.cost[i]
    on.of_kind[d, held.kind[i]] += 1
    on.calls[d] += on.of_kind[d, held.kind[i]] == 1


@compiled
def _leave(on: Devices, held: Held, d: int, i: int) -> None:
    on.held[d] -= 1
    on.tokens[d] -= held.size[i]
    on.spent[d] -= held.cost[i]
    on.of_kind[d, held.kind[i]] -= 1
    on.calls[d] -= on.of_kind[d, held.kind[i]] == 0


@compiled
def _longest(on: Devices, held: Held, d: int, device: Ints) -> None:
    """Find the two largest costs and sizes on a device, which only padding asks for."""
    if not held.padded:
        return
    on.top[d], on.longest[d] = 0.0, 0
    for i in range(len(device)):
        if device[i] == d:
            cost, size = held.cost[i], held.size[i]
            on.top[d, 1] = max(on.top[d, 1], min(cost, on.top[d, 0]))
            on.top[d, 0] = max(on.top[d, 0], cost)
            on.longest[d, 1] = max(on.longest[d, 1], min(size, on.longest[d, 0]))
            on.longest[d, 0] = max(on.longest[d, 0], size)


@compiled
def _rank_devices(on: Devices) -> None:
    on.busiest[:] = -1
    for d in range(len(on.held)):
        e = d
        for place in range(3):
            other = on.busiest[place]
            if e >= 0 and (other < 0 or on.seconds[e] > on.seconds[other]):
                on.busiest[place], e = e, other


@compiled
def _arrange(ports: Ports, x: int, n: int) -> None:
    """Time the ports of a node's devices, and sort them by insertion: equal ones by number."""
    load, group = ports.load, ports.order.shape[2]
    for place in range(group):
        d, at = n * group + place, place
        near, far = max(load[x, 0, 0, d], load[x, 1, 0, d]), max(load[x, 0, 1, d], load[x, 1, 1, d])
        ports.busy[x, d] = max(ports.alpha[0] + ports.beta[0] * near, ports.alpha[1] + ports.beta[1] * far)
        while at > 0 and ports.busy[x, ports.order[x, n, at - 1]] < ports.busy[x, d]:
            ports.order[x, n, at] = ports.order[x, n, at - 1]
            at -= 1
        ports.order[x, n, at] = d


@compiled
def _rank(ports: Ports, x: int) -> None:
    ports.nodes[x] = -1
    for n in range(ports.order.shape[1]):
        m = n
        for place in range(3):
            other = ports.nodes[x, place]
            if m >= 0 and (other < 0 or ports.busy[x, ports.order[x, m, 0]] > ports.busy[x, ports.order[x, other, 0]]):
                ports.nodes[x, place], m = m, other
