"""The swaps that shortens the time of the exchanges. Compiled where numba is installed.

To be imported in the call that needs it.

Legend: I samples; D devices; N nodes; C link classes, inside nodes (0) and between them (1); X exchanges.
"""

import numpy as np
from numpy.typing import NDArray

from ..transport import Ints, compiled

__all__ = ["swap"]

Floats = NDArray[np.float64]
LEAST_GAIN = 1e-9  # relatively; less is rounding
MAX_SWEEPS = 8


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
    home = _homes(rows, group)
    load = _loads(rows, device, group)
    busy = _node_times(load, group, alpha, beta)
    time = _time(busy)
    idle = 0
    for turn in range(MAX_SWEEPS * num_samples):
        i, idle = turn % num_samples, idle + 1
        best, least = -1, time * (1 - LEAST_GAIN)
        for j in range(len(device)):
            if device[j] != device[i]:
                found = _swapped(load, busy, rows, home, i, j, device[i], device[j], alpha, beta, least)
                if found < least:
                    best, least = j, found
        if best >= 0:
            device[i], device[best] = device[best], device[i]
            load = _loads(rows, device, group)
            busy = _node_times(load, group, alpha, beta)
            time, idle = _time(busy), 0
        elif idle == num_samples:
            break
    return time


@compiled
def _homes(rows: Floats, group: int) -> Floats:
    """The copies that each sample sends over each link class if it is on a device, `[X, C, I, D]`."""
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
def _loads(rows: Floats, device: Ints, group: int) -> Floats:
    """The copies through every port, `[X, 2, C, D]`, as `ports.sample_copies` counts them."""
    load = np.zeros((len(rows), 2, 2, rows.shape[2]))
    for x in range(len(rows)):
        for i in range(len(device)):
            here = device[i]
            for d in range(rows.shape[2]):
                if d != here:
                    link = 0 if d // group == here // group else 1
                    load[x, 0, link, here] += rows[x, i, d]
                    load[x, 1, link, d] += rows[x, i, d]
    return load


@compiled
def _node_times(load: Floats, group: int, alpha: Floats, beta: Floats) -> Floats:
    """The seconds of the busiest port of each node, `[X, N]`."""
    busy = np.zeros((len(load), load.shape[3] // group))
    for x in range(len(load)):
        for d in range(load.shape[3]):
            for link in range(2):
                copies = max(load[x, 0, link, d], load[x, 1, link, d])
                busy[x, d // group] = max(busy[x, d // group], alpha[link] + beta[link] * copies)
    return busy


@compiled
def _time(busy: Floats) -> float:
    """The busiest ports' seconds, summed over the exchanges."""
    total = 0.0
    for x in range(len(busy)):
        total += busy[x].max()
    return total


@compiled
def _swapped(
    load: Floats, busy: Floats, rows: Floats, home: Floats, i: int, j: int, a: int, b: int,
    alpha: Floats, beta: Floats, least: float
) -> float:  # fmt: skip
    """The time with sample i, of device a, and j, of b, swapped; where that is not under `least`, perhaps less."""
    group, total = rows.shape[2] // busy.shape[1], 0.0
    for x in range(len(busy)):
        total += _rest(busy[x], a // group, b // group)
    for x in range(len(busy)):
        if total >= least:
            break
        rest = _rest(busy[x], a // group, b // group)
        limit = least - (total - rest)
        busiest = max(rest, _node_after(load[x], rows[x], home[x], i, j, group, a, b, alpha, beta, limit))
        if busiest < limit:
            busiest = max(busiest, _node_after(load[x], rows[x], home[x], j, i, group, b, a, alpha, beta, limit))
        total += busiest - rest
    return total


@compiled
def _node_after(
    load: Floats, rows: Floats, home: Floats, out: int, into: int, group: int, own: int, other: int,
    alpha: Floats, beta: Floats, limit: float
) -> float:  # fmt: skip
    """The seconds of the busiest port on the node of `own`, but for `other`, once one sample went out and another came;
    where that is not under `limit`, perhaps less.

    Every device of the node reaches both by another link then; on one node only their own devices do.
    """
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
        near_s = alpha[0] + beta[0] * max(home_near, near)
        far_s = alpha[1] + beta[1] * max(home_far, far)
        busiest = max(busiest, near_s, far_s)
        if busiest >= limit:
            break
    return busiest


@compiled
def _rest(busy: Floats, here: int, there: int) -> float:
    """The seconds of the busiest of the other nodes."""
    rest = 0.0
    for node in range(len(busy)):
        if node != here and node != there:
            rest = max(rest, busy[node])
    return rest
