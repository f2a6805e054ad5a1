"""A lower bound on the time of the exchanges as their busiest ports set it, over all homes of the samples.

Legend: I samples; D devices; C link classes, inside nodes (0) and between them (1); X exchanges.
"""

from dataclasses import dataclass

import numpy as np

from ..arrays import Floats, Ints
from ..assignment import balanced_assignment
from .bottleneck import Channels
from .traffic import Traffic

STEPS = 16  # each costs a transportation; more raise the bound by little
RATE, SLOWER = 20.0, 0.6  # of the weights' growth: valid at any, chosen for a high bound after few steps


@dataclass(frozen=True, slots=True, eq=False)
class PortBound:
    """Lower bound of the exchanges' seconds, and the weights of ports that prove it, `[X, C, 2, D]`."""

    seconds: float
    weights: Floats


def least_time(traffic: Traffic, capacity: Ints, channels: Channels) -> PortBound:
    """The highest bound found on the time of homes within the capacities.

    Parameters
    ----------
    capacity
        The most samples per device takes, `[D]`.

    Notes
    -----
    The busiest port takes at least any weighted mean of all, and the homes with the least mean are a transportation
    problem. With weights w >= 0 of the ports of every class, direction and device, which sum to 1 in each exchange,

        bound = max_w min_homes sum_x sum_{c, end, d} w[x, c, end, d] (alpha[c] + beta[c] copies[x, c, end, d]),

    valid at every w. The weights start equal and grow exponentially where the least homes take long (multiplicative
    weights), more slowly after every step that did not raise the bound.

    References
    ----------
    Arora, Hazan and Kale, The Multiplicative Weights Update Method, Theory of Computing 8 (2012), section 3.2.
    """
    rows_XID = np.array(traffic.exchanges)
    score_XC2D = np.zeros((len(rows_XID), 2, 2, len(capacity)))
    best, rate = PortBound(0.0, np.full_like(score_XC2D, 0.25 / len(capacity))), RATE
    for _ in range(STEPS):
        weight_XC2D = np.exp(score_XC2D - score_XC2D.max(axis=(1, 2, 3), keepdims=True))
        weight_XC2D /= weight_XC2D.sum(axis=(1, 2, 3), keepdims=True)
        cost_ID = (rows_XID @ prices(weight_XC2D, channels)).sum(axis=0)
        device_I = balanced_assignment(cost_ID, capacity)
        start = float((channels.alpha @ weight_XC2D.sum(axis=(2, 3)).T).sum())
        value = start + float(cost_ID[np.arange(len(cost_ID)), device_I].sum())
        if value > best.seconds:
            best = PortBound(value, weight_XC2D)
        else:
            rate *= SLOWER
        taken_XC2D = np.array([channels.seconds(x, device_I) for x in traffic.exchanges])
        score_XC2D += rate * taken_XC2D / max(taken_XC2D.max(), 1e-300)
    return best


def prices(weight_XC2D: Floats, channels: Channels) -> Floats:
    """The weighted seconds of a copy with device e (first) of a sample on device d, `[X, D, D]`."""
    near_DD, far_DD = channels.crosses
    price_XC2D = weight_XC2D * channels.beta[:, None, None]
    intra_XDD, inter_XDD = (price_XC2D[:, c, 1, :, None] + price_XC2D[:, c, 0, None, :] for c in (0, 1))
    return np.asarray(near_DD * intra_XDD + far_DD * inter_XDD)
