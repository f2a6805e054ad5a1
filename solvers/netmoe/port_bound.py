"""A lower bound on what the busiest port carries, over all homes of the samples.

Legend: I samples; M sinks, the nodes, or the devices of a single node; X exchanges.
"""

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ..assignment import balanced_assignment
from .traffic import Traffic

__all__ = ["busiest_bound"]

STEPS = 32
RATE = 8.0


def busiest_bound(traffic: Traffic, capacity: NDArray[np.int64], cluster: Cluster) -> float:
    """The least sum over the exchanges of the copies through the busiest node (on one node: device).

    Parameters
    ----------
    capacity
        The most samples a device takes, `[D]`.

    Notes
    -----
    The busiest port carries at least any weighted mean of all, and the homes with the least mean are a transportation
    problem. With weights w >= 0 of sending and receiving at each sink, which sum to 1 in each exchange,

        bound = max_w min_homes sum_x (sum_m w[x, 0, m] load[x, 0, m] + w[x, 1, m] load[x, 1, m]),

    valid at every w. The weights start equal and grow where the loads of the least homes are high.
    """
    group = cluster.devices_per_node if cluster.num_nodes > 1 else 1
    near_XIM = np.array([x.reshape(len(x), -1, group).sum(axis=2) for x in traffic.exchanges])
    far_XIM = near_XIM.sum(axis=2, keepdims=True) - near_XIM
    room_M = capacity.reshape(-1, group).sum(axis=1)
    sample = np.arange(near_XIM.shape[1])
    score_X2M = np.zeros((len(near_XIM), 2, len(room_M)))
    best = 0.0
    for step in range(STEPS):
        weight_X2M = np.exp(score_X2M - score_X2M.max(axis=(1, 2), keepdims=True))
        weight_X2M /= weight_X2M.sum(axis=(1, 2), keepdims=True)
        home_XM, expert_XM = weight_X2M[:, 0], weight_X2M[:, 1]
        drawn_XI = np.einsum("xim,xm->xi", near_XIM, expert_XM)
        cost_IM = (home_XM[:, None] * far_XIM + drawn_XI[..., None] - expert_XM[:, None] * near_XIM).sum(axis=0)
        sink_I = balanced_assignment(cost_IM, room_M)
        best = max(best, float(cost_IM[sample, sink_I].sum()))
        here_IM = sink_I[:, None] == np.arange(len(room_M))
        load_X2M = np.stack([(far_XIM * here_IM).sum(axis=1), (near_XIM * ~here_IM).sum(axis=1)], axis=1)
        score_X2M += RATE / (1 + step) ** 0.5 * load_X2M / max(load_X2M.max(), 1e-300)
    return best
