"""The moves and swaps of samples that shorten the time of the exchanges, and of attention where that is timed.

Compiled: to be imported in the call that needs it; in one file, as only a file that changed is compiled anew.
Copies and costs are multiples of units whose sums are exact: loads to which what a step changes is added equal a count
of all samples to the bit.

Legend: I samples; D devices; N nodes; C link classes, inside nodes (0) and between them (1); X exchanges; G kinds of
samples; K ports of an exchange that are watched.
"""

from typing import NamedTuple

import numpy as np

from ..arrays import Bools, Floats, Ints
from ..compiled import compiled, inlined

LEAST_GAIN = 1e-9  # relatively; less is rounding
ROUNDING = 1e-12  # relatively; of one candidate's time
MAX_SWEEPS = 8
WATCHED = 4  # ports of an exchange: with more, few more candidates are ruled out
KICKS, PAIRS = 6, 2  # of a search; a kick costs about a descent


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


class _Ports(NamedTuple):
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


class _Watch(NamedTuple):
    """The busiest ports of every exchange, `[X, K]`, which rule most candidates out.

    Port k takes `level[x, k]` seconds, of which sample i takes `share[i, x, k]` if it is on a device d with
    `side[d, x, k]` 1, nothing where that is 0. Samples i and j of devices a and b, exchanged, change it by
    (side[b] - side[a]) (share[i] - share[j]).
    """

    level: Floats
    share: Floats
    side: Floats


class _State(NamedTuple):
    """Counts that a search keeps; `_placed` counts them from nothing, `_exchange` only what a step changes."""

    ports: _Ports
    on: _Devices
    watch: _Watch
    held: Held


@compiled
def shorten(rows: Floats, starts: Ints, group: int, alpha: Floats, beta: Floats, held: Held) -> tuple[float, Ints]:
    """The time of attention and exchanges, and the homes `[I]`, once samples, each in its turn, took their best move or
    swap until none gains: the best from all starts, then kicked.

    Parameters
    ----------
    rows
        Copies with every device, `[X, I+1, D]`, whose sums are exact; the last sample is none, and has none.
    starts
        Where each is, `[S, I]`, at one or several starts.
    group
        Devices a node.
    alpha, beta
        Seconds to start and a copy, `[C]`.

    Notes
    -----
    A sweep tries I (I + D) candidates. A device that changes neither the busiest port of an exchange nor the longest
    attention is passed over; most others' candidates the watched ports rule out in O(X K), and the rest take O(X) or,
    with G devices a node, O(X G). A step taken costs O(X (I K + D)).

    A kick swaps random pairs of the best homes' samples where the room allows it, and descends again. One costs about
    a start's descent. Its numbers are those of one seed: every rank draws the same.
    """
    state, drawn = _state(rows, starts[0], group, alpha, beta, held), 1
    best, least = starts[0].copy(), np.inf
    for turn in range(len(starts) + KICKS):
        device = starts[turn].copy() if turn < len(starts) else best.copy()
        time = _placed(state, device)
        if turn >= len(starts):
            time, drawn = _kicked(state, device, drawn)
        time = _descended(state, device, time)
        if time < least:
            best, least = device, time
    return least, best


@compiled
def _kicked(state: _State, device: Ints, drawn: int) -> tuple[float, int]:
    """The time once random pairs of samples are swapped, and the last number drawn."""
    for _ in range(PAIRS):
        i = _next(drawn)
        j = _next(i)
        drawn, i, j = j, (i >> 8) % len(device), (j >> 8) % len(device)
        if device[i] != device[j] and _fits(state.on, state.held, device[i], device[j], i, j):
            _exchange(state, device, i, j, device[j])
    return _time(state), drawn


@inlined
def _next(drawn: int) -> int:
    """The next number of a linear congruential generator; its low bits repeat soon."""
    return (drawn * 1103515245 + 12345) % 2**31


@compiled
def _state(rows: Floats, device: Ints, group: int, alpha: Floats, beta: Floats, held: Held) -> _State:
    num_exchanges, num_samples, num_devices = rows.shape[0], len(device), rows.shape[2]
    num_nodes = num_devices // group
    ports = _Ports(
        rows,
        _homes(rows, group),
        np.zeros((num_exchanges, 2, 2, num_devices)),
        np.zeros((num_exchanges, num_devices)),
        np.zeros((num_exchanges, num_nodes, group), np.int64),
        np.zeros((num_exchanges, 3), np.int64),
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
    shape = (num_exchanges, WATCHED)
    watch = _Watch(np.zeros(shape), np.zeros((num_samples + 1, *shape)), np.zeros((num_devices, *shape)))
    return _State(ports, on, watch, held)


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
def _placed(state: _State, device: Ints) -> float:
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
        on.seconds[d] = _attention(on, held, d, none, none)
    _rank_devices(on)
    return _time(state)


@inlined
def _time(state: _State) -> float:
    """The time of attention and exchanges."""
    time = state.on.seconds[state.on.busiest[0]]
    for x in range(len(state.ports.nodes)):
        time += state.ports.busy[x, state.ports.order[x, state.ports.nodes[x, 0], 0]]
    return float(time)


@compiled
def _enter(on: _Devices, held: Held, d: int, i: int) -> None:
    on.held[d] += 1
    on.tokens[d] += held.size[i]
    on.spent[d] += held.cost[i]
    on.of_kind[d, held.kind[i]] += 1
    on.calls[d] += on.of_kind[d, held.kind[i]] == 1


@compiled
def _leave(on: _Devices, held: Held, d: int, i: int) -> None:
    on.held[d] -= 1
    on.tokens[d] -= held.size[i]
    on.spent[d] -= held.cost[i]
    on.of_kind[d, held.kind[i]] -= 1
    on.calls[d] -= on.of_kind[d, held.kind[i]] == 0


@compiled
def _longest(on: _Devices, held: Held, d: int, device: Ints) -> None:
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
def _rank_devices(on: _Devices) -> None:
    on.busiest[:] = -1
    for d in range(len(on.held)):
        e = d
        for place in range(3):
            other = on.busiest[place]
            if e >= 0 and (other < 0 or on.seconds[e] > on.seconds[other]):
                on.busiest[place], e = e, other


@compiled
def _arrange(ports: _Ports, x: int, n: int) -> None:
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
def _rank(ports: _Ports, x: int) -> None:
    ports.nodes[x] = -1
    for n in range(ports.order.shape[1]):
        m = n
        for place in range(3):
            other = ports.nodes[x, place]
            if m >= 0 and (other < 0 or ports.busy[x, ports.order[x, m, 0]] > ports.busy[x, ports.order[x, other, 0]]):
                ports.nodes[x, place], m = m, other


@compiled
def _exchange(state: _State, device: Ints, i: int, j: int, b: int) -> None:
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
        on.seconds[d] = _attention(on, held, d, none, none)
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


@compiled
def _look(state: _State) -> None:
    """Fill what is watched."""
    ports, watch = state.ports, state.watch
    num_devices, group = ports.rows.shape[2], ports.order.shape[2]
    which = np.zeros(WATCHED, np.int64)
    for x in range(len(ports.rows)):
        watch.level[x] = -1.0
        for end in range(2):
            for c in range(2):
                for d in range(num_devices):
                    seconds, k = ports.alpha[c] + ports.beta[c] * ports.load[x, end, c, d], WATCHED - 1
                    if seconds > watch.level[x, k]:
                        while k > 0 and watch.level[x, k - 1] < seconds:
                            watch.level[x, k], which[k] = watch.level[x, k - 1], which[k - 1]
                            k -= 1
                        watch.level[x, k], which[k] = seconds, (end * 2 + c) * num_devices + d
        for k in range(WATCHED):
            end, c, e = which[k] // (2 * num_devices), which[k] // num_devices % 2, which[k] % num_devices
            for d in range(num_devices):
                on_node = d // group == e // group
                reaches = not on_node if c == 1 else on_node and d != e
                watch.side[d, x, k] = d == e if end == 0 else reaches
            copies = ports.home[x, c] if end == 0 else ports.rows[x]
            for i in range(len(copies)):
                watch.share[i, x, k] = ports.beta[c] * copies[i, e]


@compiled
def _descended(state: _State, device: Ints, time: float) -> float:
    """The time once no move and no swap gains."""
    ports, on, watch, held, none, idle = state.ports, state.on, state.watch, state.held, len(device), 0
    shape = (len(on.held), *watch.level.shape)
    shared, sign, base = np.zeros(len(on.held), np.bool_), np.zeros(shape), np.zeros(shape)
    _look(state)
    for turn in range(MAX_SWEEPS * none):
        i, idle = turn % none, idle + 1
        a, best, goal, least = device[i], none, -1, time * (1 - LEAST_GAIN)
        hot, spent = on.busiest[0], on.seconds[on.busiest[0]]
        any_shared = _compared(watch, a, i, hot, shared, sign, base)
        for j in range(none + len(on.held) if any_shared else 0):
            b, other = (device[j], j) if j < none else (j - none, none)
            if not shared[b] or (j >= none and on.held[b] >= held.places[b]):
                continue
            total = 0.0 if a == hot or b == hot else spent
            for x in range(shape[1]):
                busiest = 0.0
                for k in range(WATCHED):
                    seconds = base[b, x, k] - sign[b, x, k] * watch.share[other, x, k]
                    busiest = seconds if seconds > busiest else busiest
                total += busiest
            if total < least * (1 + ROUNDING) and _fits(on, held, a, b, i, other):
                found = _after(ports, on, held, i, other, a, b, least)
                if found < least:
                    best, goal, least = other, b, found
        if goal >= 0:
            _exchange(state, device, i, best, goal)
            _look(state)
            time, idle = _time(state), 0
        elif idle == none:
            break
    return time


@inlined
def _compared(watch: _Watch, a: int, i: int, hot: int, shared: Bools, sign: Floats, base: Floats) -> bool:
    """Compare every device with a, that of sample i: fill the change of watched ports, and whether it may gain.

    It may where one of them is `hot`, whose attention takes longest, or the busiest port of an exchange changes.
    """
    some = False
    for b in range(len(shared)):
        shared[b] = a == hot or b == hot
        for x in range(len(watch.level)):
            shared[b] |= watch.side[b, x, 0] != watch.side[a, x, 0]
        shared[b] &= b != a
        some |= shared[b]
        if shared[b]:
            for x in range(len(watch.level)):
                for k in range(WATCHED):
                    sign[b, x, k] = watch.side[b, x, k] - watch.side[a, x, k]
                    base[b, x, k] = watch.level[x, k] + sign[b, x, k] * watch.share[i, x, k]
    return some


@inlined
def _attention(on: _Devices, held: Held, d: int, out: int, into: int) -> float:
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


@inlined
def _after(ports: _Ports, on: _Devices, held: Held, i: int, j: int, a: int, b: int, least: float) -> float:
    """The time with sample i, of device a, and j, of b or none, exchanged; where not under `least`, perhaps less."""
    total = max(_attention(on, held, a, i, j), _attention(on, held, b, j, i))
    for d in on.busiest:
        if d >= 0 and d != a and d != b:
            total = max(total, on.seconds[d])
            break
    for x in range(len(ports.nodes)):  # the ports that are busiest now tell of most candidates that they do not gain
        total += _least(ports, x, i, j, a, b)
    for x in range(len(ports.nodes)):
        if total >= least:
            break
        known = _least(ports, x, i, j, a, b)
        limit, busiest = least - (total - known), _rest(ports, x, a, b)
        busiest = max(busiest, _node_after(ports, x, i, j, a, b, limit))
        if busiest < limit:
            busiest = max(busiest, _node_after(ports, x, j, i, b, a, limit))
        total += busiest - known
    return total


@inlined
def _rest(ports: _Ports, x: int, a: int, b: int) -> float:
    """The seconds of the busiest port of other nodes than those of devices a and b."""
    group, seconds = ports.order.shape[2], 0.0
    for n in ports.nodes[x]:
        if n >= 0 and n != a // group and n != b // group:
            seconds = ports.busy[x, ports.order[x, n, 0]]
            break
    return float(seconds)


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
    return max(_rest(ports, x, a, b), _port_after(ports, x, d, out, into, d == own, n == m))


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
