"""E/D + 1 slots a device are enough for every load: a placement under which all devices have the mean, exactly.

Legend: E experts; D devices; S slots of each.
"""

import numpy as np

from ..arrays import Floats, Ints


def exact(loads: Floats, num_devices: int) -> tuple[Ints, Floats]:
    """The expert in every slot `[D, S]`, -1 in empty ones, and what it serves there; every device serves the mean.

    Parameters
    ----------
    loads
        Of the experts, `[E]`, at least 0.

    Notes
    -----
    S = k + 1 with k = ceil(E / D): empty experts fill E up to k D. Device by device, of the k D' experts left for D'
    devices, k are taken whole and of one more a part, so that they sum to the mean m. Such k exist. The k smallest sum
    to m at most and the k largest to m at least; on the way from the former to the latter, one exchange after the
    other, let a -> b be the first to pass m. The set before it leaves m - sum <= load of b, which is b's part. What
    remains are k (D' - 1) experts with a mean of m still.

    It holds for the loads it is made for: the replicas form a tree, which has no slack for others.
    """
    each = -(-len(loads) // num_devices)
    mean = loads.sum() / num_devices
    table, served = np.full((num_devices, each + 1), -1), np.zeros((num_devices, each + 1))
    left = np.concatenate([loads, np.zeros(each * num_devices - len(loads))])
    expert = np.concatenate([np.arange(len(loads)), np.full(len(left) - len(loads), -1)])
    for d in range(num_devices):
        order = np.argsort(left, kind="stable")
        left, expert = left[order], expert[order]
        chosen, part = _whole(left, each, mean)
        table[d, :each], served[d, :each] = expert[chosen], left[chosen]
        if part >= 0:
            table[d, each], served[d, each] = expert[part], mean - left[chosen].sum()
            left[part] -= served[d, each]
        left, expert = np.delete(left, chosen), np.delete(expert, chosen)
    served[table < 0] = 0.0
    return table, served


def _whole(left: Floats, each: int, mean: float) -> tuple[list[int], int]:
    """Places of the experts, ascending, that a device takes whole, and of the one that it takes a part of; or -1."""
    chosen = list(range(each))
    for i in reversed(range(each)):  # the largest of the set first
        for b in range(i + 1, len(left) - each + i + 1):
            if left[chosen].sum() - left[chosen[i]] + left[b] > mean:
                return chosen, b
            chosen[i] = b
    return chosen, -1
