"""The moves and swaps of samples that shorten the time of the exchanges, and of attention where that is timed.

Compiled: to be imported in the call that needs it.

Legend: I samples; D devices; N nodes; C link classes, inside nodes (0) and between them (1); X exchanges; G kinds of
samples.
"""

from typing import NamedTuple

import numpy as np

from ..arrays import Floats, Ints
from ..compiled import compiled, inlined

LEAST_GAIN = 1e-9  # relatively; less is rounding
MAX_SWEEPS = 8


class Held(NamedTuple):
    """Samples as devices hold them; each array has a last row for no sample, of cost and size 0 and kind -1.

    The attention of a device takes

        A_d = call calls_d + sum_{i on d} cost_i,         padded:  A_d = call calls_d + samples_d max_{i on d} cost_i

    with a call for each kind of sample on it (for all that it holds where they are padded): none where it holds none.
    """

    cost: Floats  #: Seconds of attention, `[I+1]`; all 0: attention does not count
    kind: Ints  #: Samples of one kind attend in one call, `[I+1]`
    size: Ints  #: Tokens, `[I+1]`
    call: float  #: Seconds to start a call
    padded: bool  #: Whether a device's samples are padded to its longest
    places: Ints  #: The most samples that a device takes, `[D]`
    room: int  #: The most tokens, padding included


class _Ports(NamedTuple):
    """Copies that samples send, and the ports as their homes load them.

    `rows[x, i, d]` are copies with device d, `home[x, c, i, d]` those that the sample sends over a link class if it is
    on device d. `load[x, end, c, d]` go through a port, at the samples' ends (0) or their experts' (1), as
    `ports.sample_copies` counts them. `busy[x, d]` are the seconds of a device's busiest port, `order[x, n]` a node's
    devices by these, the busiest first, and `rest[x, n, m]` those of the busiest but for nodes n and m.
    """

    rows: Floats
    home: Floats
    load: Floats
    busy: Floats
    order: Ints
    rest: Floats
    alpha: Floats
    beta: Floats


class _Devices(NamedTuple):
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


@compiled
def shorten(rows: Floats, device: Ints, group: int, alpha: Floats, beta: Floats, held: Held) -> float:
    """The time of attention and exchanges once samples, each in its turn, took their best move or swap until none
    gains.

    Parameters
    ----------
    rows
        Copies with every device, `[X, I+1, D]`; the last sample is none, and has none.
    device
        Where each is, `[I]`; changed in place.
    group
        Devices a node.
    alpha, beta
        Seconds to start and a copy, `[C]`.

    Notes
    -----
    A sweep tries I (I + D) candidates, most of which attention alone or one exchange rules out: O(1) each, else
    O(X G) with G devices a node. A step taken costs I D more.
    """
    num_exchanges, num_samples, num_devices = rows.shape[0], len(device), rows.shape[2]
    num_nodes = num_devices // group
    ports = _Ports(
        rows,
        _homes(rows, group),
        np.zeros((num_exchanges, 2, 2, num_devices)),
        np.zeros((num_exchanges, num_devices)),
        np.zeros((num_exchanges, num_nodes, group), np.int64),
        np.zeros((num_exchanges, num_nodes, num_nodes)),
        alpha,
        beta,
    )
    on = _Devices(
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
    time = _fill(ports, device, group) + _count(on, held, device)
    idle = 0
    for turn in range(MAX_SWEEPS * num_samples):
        i, idle = turn % num_samples, idle + 1
        a, best, goal, least = device[i], -1, -1, time * (1 - LEAST_GAIN)
        for j in range(num_samples):
            if device[j] != a and _fits(on, held, a, device[j], i, j):
                found = _after(ports, on, held, i, j, a, device[j], least)
                if found < least:
                    best, goal, least = j, device[j], found
        for b in range(num_devices):
            if b != a and on.held[b] < held.places[b] and _fits(on, held, a, b, i, num_samples):
                found = _after(ports, on, held, i, num_samples, a, b, least)
                if found < least:
                    best, goal, least = num_samples, b, found
        if goal >= 0:
            device[i] = goal
            if best < num_samples:
                device[best] = a
            time, idle = _fill(ports, device, group) + _count(on, held, device), 0
        elif idle == num_samples:
            break
    return time


@compiled
def _homes(rows: Floats, group: int) -> Floats:
    """`_Ports.home`."""
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
def _fill(ports: _Ports, device: Ints, group: int) -> float:
    """Fill what ports carry for samples on these devices; the time of the exchanges."""
    rows, load, rest, time = ports.rows, ports.load, ports.rest, 0.0
    load[:] = 0.0
    for x in range(len(rows)):
        for i in range(len(device)):
            here = device[i]
            for d in range(rows.shape[2]):
                if d != here:
                    link = 0 if d // group == here // group else 1
                    load[x, 0, link, here] += rows[x, i, d]
                    load[x, 1, link, d] += rows[x, i, d]
        for d in range(rows.shape[2]):
            near, far = max(load[x, 0, 0, d], load[x, 1, 0, d]), max(load[x, 0, 1, d], load[x, 1, 1, d])
            ports.busy[x, d] = max(ports.alpha[0] + ports.beta[0] * near, ports.alpha[1] + ports.beta[1] * far)
        for n in range(len(ports.order[x])):
            ports.order[x, n] = n * group + np.argsort(-ports.busy[x, n * group : n * group + group], kind="mergesort")
        for n in range(len(rest[x])):
            for m in range(len(rest[x])):
                rest[x, n, m] = 0.0
                for other in range(len(rest[x])):
                    if other != n and other != m:
                        rest[x, n, m] = max(rest[x, n, m], ports.busy[x, ports.order[x, other, 0]])
        time += ports.busy[x].max()
    return time


@compiled
def _count(on: _Devices, held: Held, device: Ints) -> float:
    """Fill what devices hold; the time of attention."""
    on.held[:], on.tokens[:], on.calls[:], on.of_kind[:] = 0, 0, 0, 0
    on.spent[:], on.top[:], on.longest[:] = 0.0, 0.0, 0
    for i in range(len(device)):
        d, cost, size = device[i], held.cost[i], held.size[i]
        on.held[d] += 1
        on.tokens[d] += size
        on.spent[d] += cost
        on.of_kind[d, held.kind[i]] += 1
        on.calls[d] += on.of_kind[d, held.kind[i]] == 1
        on.top[d, 1] = max(on.top[d, 1], min(cost, on.top[d, 0]))
        on.top[d, 0] = max(on.top[d, 0], cost)
        on.longest[d, 1] = max(on.longest[d, 1], min(size, on.longest[d, 0]))
        on.longest[d, 0] = max(on.longest[d, 0], size)
    none = len(device)
    on.busiest[:] = -1
    for d in range(len(on.held)):
        on.seconds[d] = _attention(on, held, d, none, none)
        e = d
        for place in range(3):
            other = on.busiest[place]
            if e >= 0 and (other < 0 or on.seconds[e] > on.seconds[other]):
                on.busiest[place], e = e, other
    return float(on.seconds.max())


@inlined
def _attention(on: _Devices, held: Held, d: int, out: int, into: int) -> float:
    """Seconds of attention on device d once one sample went out and another came; either may be none."""
    none = len(held.cost) - 1
    samples = on.held[d] - (out != none) + (into != none)
    if held.padded:
        longest = on.top[d, 1] if out != none and held.cost[out] == on.top[d, 0] else on.top[d, 0]
        return float(held.call * (samples > 0) + samples * max(longest, held.cost[into]))
    calls, left, came = on.calls[d], held.kind[out], held.kind[into]
    if left != came:
        calls -= left >= 0 and on.of_kind[d, left] == 1
        calls += came >= 0 and on.of_kind[d, came] == 0
    return float(held.call * calls + (on.spent[d] - held.cost[out] + held.cost[into]))


@inlined
def _tokens(on: _Devices, held: Held, d: int, out: int, into: int) -> int:
    """Tokens of device d, padding included, once one sample went out and another came."""
    none = len(held.size) - 1
    if not held.padded:
        return int(on.tokens[d] - held.size[out] + held.size[into])
    samples = on.held[d] - (out != none) + (into != none)
    longest = on.longest[d, 1] if out != none and held.size[out] == on.longest[d, 0] else on.longest[d, 0]
    return int(samples * max(longest, held.size[into]))


@inlined
def _fits(on: _Devices, held: Held, a: int, b: int, i: int, j: int) -> bool:
    """Check whether devices a and b keep within the room, or grow no fuller, once they exchange samples i and j."""
    none = len(held.size) - 1
    for d, out, into in ((a, i, j), (b, j, i)):
        if _tokens(on, held, d, out, into) > max(held.room, _tokens(on, held, d, none, none)):
            return False
    return True


@compiled
def _after(ports: _Ports, on: _Devices, held: Held, i: int, j: int, a: int, b: int, least: float) -> float:
    """The time with sample i, of device a, and j, of b or none, exchanged; where not under `least`, perhaps less."""
    group = ports.rows.shape[2] // ports.rest.shape[1]
    n, m = a // group, b // group
    total = max(_attention(on, held, a, i, j), _attention(on, held, b, j, i))
    for d in on.busiest:
        if d >= 0 and d != a and d != b:
            total = max(total, on.seconds[d])
            break
    for x in range(len(ports.rest)):  # the ports that are busiest now tell of most candidates that they do not gain
        total += _least(ports, x, i, j, a, b)
    for x in range(len(ports.rest)):
        if total >= least:
            break
        known = _least(ports, x, i, j, a, b)
        limit, busiest = least - (total - known), ports.rest[x, n, m]
        busiest = max(busiest, _node_after(ports, x, i, j, a, b, limit))
        if busiest < limit:
            busiest = max(busiest, _node_after(ports, x, j, i, b, a, limit))
        total += busiest - known
    return total


@inlined
def _least(ports: _Ports, x: int, i: int, j: int, a: int, b: int) -> float:
    """The seconds of what is the busiest port of both nodes now, and of other nodes, once samples i and j changed."""
    group = ports.order.shape[2]
    n, m = a // group, b // group
    d, out, into, own = ports.order[x, n, 0], i, j, a
    if ports.busy[x, ports.order[x, m, 0]] > ports.busy[x, d]:
        d, out, into, own = ports.order[x, m, 0], j, i, b
    if n == m:
        out, into, own = (j, i, b) if d == b else (i, j, a)
    return max(float(ports.rest[x, n, m]), _port_after(ports, x, d, out, into, d == own, n == m))


@inlined
def _node_after(ports: _Ports, x: int, out: int, into: int, own: int, other: int, limit: float) -> float:
    """The seconds of the busiest port on the node of `own`, but for `other`, once one sample went out and another came;
    where that is not under `limit`, perhaps less.

    Every device of the node reaches both by another link then; on one node only their own devices do.
    """
    group = ports.order.shape[2]
    node, same, busiest = own // group, own // group == other // group, 0.0
    if same:
        busiest = _port_after(ports, x, own, out, into, True, True)
    for place in range(group):
        d = ports.order[x, node, place]
        if busiest >= limit:
            break
        if same and d != own and d != other:  # as it was, and no later one is busier
            busiest = max(busiest, ports.busy[x, d])
            break
        if not same:
            busiest = max(busiest, _port_after(ports, x, d, out, into, d == own, False))
    return busiest


@inlined
def _port_after(ports: _Ports, x: int, d: int, out: int, into: int, own: bool, same: bool) -> float:
    """The seconds of device d's busiest port once one sample left its node, or itself, and another came."""
    home_near, home_far = ports.load[x, 0, 0, d], ports.load[x, 0, 1, d]
    near, far = ports.load[x, 1, 0, d], ports.load[x, 1, 1, d]
    change = ports.rows[x, out, d] - ports.rows[x, into, d]
    if not same:
        far += change
        near -= 0.0 if own else change
    elif own:
        near += change
    if own:
        home_near -= ports.home[x, 0, out, d] - ports.home[x, 0, into, d]
        home_far -= ports.home[x, 1, out, d] - ports.home[x, 1, into, d]
    near_s = ports.alpha[0] + ports.beta[0] * max(home_near, near)
    return float(max(near_s, ports.alpha[1] + ports.beta[1] * max(home_far, far)))
