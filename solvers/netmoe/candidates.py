"""Candidates of a search for homes: exchanges of two samples, ruled out by the ports that are watched, or timed whole;
compiled.

Legend: as `state`.
"""

import numpy as np

from ..arrays import Bools, Floats
from ..compiled import compiled, inlined
from .state import WATCHED, Devices, Held, Ports, State, Watch, attention


@compiled
def look(state: State) -> None:
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


@inlined
def compared(watch: Watch, a: int, i: int, hot: int, shared: Bools, sign: Floats, base: Floats) -> bool:
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
def fits(on: Devices, held: Held, a: int, b: int, i: int, j: int) -> bool:
    """Check whether devices a and b keep within the room, or grow no fuller, once they exchange samples i and j."""
    none = len(held.size) - 1
    for d, out, into in ((a, i, j), (b, j, i)):
        if _tokens(on, held, d, out, into) > max(held.room, _tokens(on, held, d, none, none)):
            return False
    return True


@inlined
def after(ports: Ports, on: Devices, held: Held, i: int, j: int, a: int, b: int, least: float) -> float:
    """The time with sample i, of device a, and j, of b or none, exchanged; where not under `least`, perhaps less."""
    total = max(attention(on, held, a, i, j), attention(on, held, b, j, i))
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
def _tokens(on: Devices, held: Held, d: int, out: int, into: int) -> int:
    """Tokens of device d, padding included, once one sample went out and another came."""
    none = len(held.size) - 1
    if not held.padded:
        return int(on.tokens[d] - held.size[out] + held.size[into])
    samples = on.held[d] - (out != none) + (into != none)
    longest = on.longest[d, 1] if out != none and held.size[out] == on.longest[d, 0] else on.longest[d, 0]
    return int(samples * max(longest, held.size[into]))


@inlined
def _rest(ports: Ports, x: int, a: int, b: int) -> float:
    """The seconds of the busiest port of other nodes than those of devices a and b."""
    group, seconds = ports.order.shape[2], 0.0
    for n in ports.nodes[x]:
        if n >= 0 and n != a // group and n != b // group:
            seconds = ports.busy[x, ports.order[x, n, 0]]
            break
    return float(seconds)


@inlined
def _least(ports: Ports, x: int, i: int, j: int, a: int, b: int) -> float:
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
def _node_after(ports: Ports, x: int, out: int, into: int, own: int, other: int, limit: float) -> float:
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
def _port_after(ports: Ports, x: int, d: int, out: int, into: int, own: bool, same: bool) -> float:
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
