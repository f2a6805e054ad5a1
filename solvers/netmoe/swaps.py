"""The swaps that shorten the time of the exchanges.

Compiled: to be imported in the call that needs it.

Legend: I samples; D devices; N nodes; C link classes, inside nodes (0) and between them (1); X exchanges.
"""

from typing import NamedTuple

import numpy as np

from ..arrays import Floats, Ints
from ..compiled import compiled

LEAST_GAIN = 1e-9  # relatively; less is rounding
MAX_SWEEPS = 8


class _Ports(NamedTuple):
    """Copies that samples send, and the ports as their homes load them.

    `rows[x, i, d]` are copies with device d, `home[x, c, i, d]` those that the sample sends over a link class if it is
    on device d. `load[x, end, c, d]` go through a port, at the samples' ends (0) or their experts' (1), as
    `ports.sample_copies` counts them; `rest[x, n, m]` are the seconds of the busiest but for nodes n and m.
    """

    rows: Floats
    home: Floats
    load: Floats
    rest: Floats
    alpha: Floats
    beta: Floats


@compiled
def swap(rows: Floats, device: Ints, num_samples: int, group: int, alpha: Floats, beta: Floats) -> float:
    """The time of the exchanges once samples, each in its turn, were swapped with their best partners until none gains.

    Parameters
    ----------
    rows
        Copies with every device, `[X, I, D]`; a free place is a sample without any.
    device
        Where each is, `[I]`; changed in place.
    num_samples
        So many of them, the first, are no free places.
    group
        Devices a node.
    alpha, beta
        Seconds to start and a copy, `[C]`.
    """
    num_exchanges, _, num_devices = rows.shape
    load = np.zeros((num_exchanges, 2, 2, num_devices))
    rest = np.zeros((num_exchanges, num_devices // group, num_devices // group))
    ports = _Ports(rows, _homes(rows, group), load, rest, alpha, beta)
    time = _fill(ports, device, group)
    idle = 0
    for turn in range(MAX_SWEEPS * num_samples):
        i, idle = turn % num_samples, idle + 1
        best, least = -1, time * (1 - LEAST_GAIN)
        for j in range(len(device)):
            if device[j] != device[i]:
                found = _swapped(ports, i, j, device[i], device[j], least)
                if found < least:
                    best, least = j, found
        if best >= 0:
            device[i], device[best] = device[best], device[i]
            time, idle = _fill(ports, device, group), 0
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
    """Fill `load` and `rest` for samples on these devices; the time of the exchanges."""
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
        busy = np.zeros(rest.shape[1])
        for d in range(rows.shape[2]):
            for link in range(2):
                copies = max(load[x, 0, link, d], load[x, 1, link, d])
                busy[d // group] = max(busy[d // group], ports.alpha[link] + ports.beta[link] * copies)
        for n in range(len(busy)):
            for m in range(len(busy)):
                rest[x, n, m] = 0.0
                for other in range(len(busy)):
                    if other != n and other != m:
                        rest[x, n, m] = max(rest[x, n, m], busy[other])
        time += busy.max()
    return time


@compiled
def _swapped(ports: _Ports, i: int, j: int, a: int, b: int, least: float) -> float:
    """The time with sample i, of device a, and j, of b, swapped; where that is not under `least`, perhaps less."""
    group = ports.rows.shape[2] // ports.rest.shape[1]
    n, m = a // group, b // group
    total = 0.0
    for x in range(len(ports.rest)):
        total += ports.rest[x, n, m]
    for x in range(len(ports.rest)):
        if total >= least:
            break
        rest = ports.rest[x, n, m]
        limit = least - (total - rest)
        busiest = max(rest, _node_after(ports, x, i, j, a, b, limit))
        if busiest < limit:
            busiest = max(busiest, _node_after(ports, x, j, i, b, a, limit))
        total += busiest - rest
    return total


@compiled
def _node_after(ports: _Ports, x: int, out: int, into: int, own: int, other: int, limit: float) -> float:
    """The seconds of the busiest port on the node of `own`, but for `other`, once one sample went out and another came;
    where that is not under `limit`, perhaps less.

    Every device of the node reaches both by another link then; on one node only their own devices do.
    """
    rows, home, load = ports.rows[x], ports.home[x], ports.load[x]
    group = rows.shape[1] // ports.rest.shape[1]
    node, busiest = own // group, 0.0
    for d in range(node * group, node * group + group):
        if d == other:
            continue
        home_near, home_far, near, far = load[0, 0, d], load[0, 1, d], load[1, 0, d], load[1, 1, d]
        change = rows[out, d] - rows[into, d]
        if node != other // group:
            far += change
            near -= change if d != own else 0.0
        elif d == own:
            near += change
        if d == own:
            home_near -= home[0, out, d] - home[0, into, d]
            home_far -= home[1, out, d] - home[1, into, d]
        near_s = ports.alpha[0] + ports.beta[0] * max(home_near, near)
        far_s = ports.alpha[1] + ports.beta[1] * max(home_far, far)
        busiest = max(busiest, near_s, far_s)
        if busiest >= limit:
            break
    return busiest
