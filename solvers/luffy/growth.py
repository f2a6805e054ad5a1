"""LUFFY's Algorithm 1: samples, the longest first, go where a padded batch grows least, among few devices.

Legend: I samples; D devices.
"""

import numpy as np

from ..arrays import Ints
from .attention import Attention


def growth(units: Ints, attention: Attention, num_devices: int) -> Ints:
    """The device of every sample, `[I]`.

    Parameters
    ----------
    units
        Copies of the sample with every device, this layer's and the next one's, `[I, D]` (`netmoe.Traffic.units`).

    Notes
    -----
    With f[i, d] the copies of sample i that leave device d, for samples by falling length, then number,

        H       = the q devices of least f[i, d]
        home[i] = argmin over d in H that fit of (B_d + 1) max(C_d, c_i) - B_d C_d,     C_d = max cost of B_d samples

    A device fits where (B_d + 1) times its longest sample is within the room; where none of H does, all devices that
    fit are tried, and where none does, all. The paper prints argmax, which piles samples on the busiest device (its
    text says what is meant), and no room for an empty device; q is half of the devices unless told.
    """
    law, size_I, cost_I = attention.law, attention.tokens, attention.cost
    room = attention.room(num_devices) if law.room is not None else int(size_I.max()) * -(-len(size_I) // num_devices)
    home_I = np.zeros(len(size_I), np.int64)
    held_D, longest_D, costs_D = np.zeros(num_devices, np.int64), np.zeros(num_devices, np.int64), np.zeros(num_devices)
    leaving_ID = units.sum(axis=1, keepdims=True) - units
    q = min(law.candidates or max(num_devices // 2, 1), num_devices)
    for i in np.argsort(-size_I, kind="stable"):
        near = np.argsort(leaving_ID[i], kind="stable")
        grown_D = (held_D + 1) * np.maximum(costs_D, cost_I[i]) - held_D * costs_D
        fits_D = (held_D + 1) * np.maximum(longest_D, size_I[i]) <= room
        among = next((few for few in (near[:q][fits_D[near[:q]]], near[fits_D[near]]) if len(few)), near)
        d = among[np.argmin(grown_D[among])]
        home_I[i] = d
        held_D[d] += 1
        longest_D[d], costs_D[d] = max(longest_D[d], size_I[i]), max(costs_D[d], cost_I[i])
    return home_I
