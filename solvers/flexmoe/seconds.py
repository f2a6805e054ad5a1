"""Seconds of one layer under the exact split of a step, and under others; compiled.

To be imported in the call that needs it.

Legend: E experts; D devices; P slots that hold an expert; M micro-batches.
"""

import numpy as np

from ..arrays import Floats, Ints
from ..compiled import compiled
from ..quota import Holders, shares
from ..step_deals import QUOTA, dealt, pair_ports
from .costs import EXCHANGES, Costs
from .state import sum_ports

PEAK = 0.4  # of the busiest port in a search; the rest is the root mean square, which sees every port


@compiled
def served_ports(pairs: Ints, served: Ints, holders: Holders) -> Ints:
    """The ports of `quota.deal` for what every slot serves `[P]`, without dealing it: `[2, 2, D]` as `pair_ports`."""
    device, group = holders.device, holders.devices_per_node
    num_devices = pairs.shape[1]
    ports, left = np.zeros((2, 2, num_devices), np.int64), np.empty(num_devices, np.int64)
    for e in range(len(pairs)):
        left[:] = pairs[e]
        for c in range(holders.expert_first[e], holders.expert_first[e + 1]):
            start, end = holders.cell_first[c], holders.cell_first[c + 1]
            room, rest = 0, 0
            for p in range(start, end):
                own = min(served[p], left[device[p]])
                left[device[p]] -= own
                room += served[p] - own
                ports[0, 1, device[p]] += served[p] - own
            for g in range(holders.node[c] * group, (holders.node[c] + 1) * group):
                rest += left[g]
            near = min(room, rest)  # the first sources send to the first slots
            for g in range(holders.node[c] * group, (holders.node[c] + 1) * group):
                some = min(left[g], near)
                ports[0, 0, g] += some
                left[g] -= some
                near -= some
            over = max(room - rest, 0)  # the last slots take the rest from other nodes
            for p in range(end - 1, start - 1, -1):
                if over == 0:
                    break
                some = min(served[p] - min(served[p], pairs[e, device[p]]), over)
                ports[0, 1, device[p]] -= some
                ports[1, 1, device[p]] += some
                over -= some
        for g in range(num_devices):
            ports[1, 0, g] += left[g]
    return ports


@compiled
def busiest(ports: Floats, smooth: bool) -> float:
    """The largest of some ports `[D]`; in a search weighed with their root mean square, so that every port counts."""
    most, squares = 0.0, 0.0
    for x in ports:
        most = max(most, x)
        squares += x * x
    return PEAK * most + (1 - PEAK) * np.sqrt(squares / len(ports)) if smooth else most


@compiled
def exchange_seconds(ports: Ints, costs: Costs, batches: int, smooth: bool) -> float:
    """Seconds of the exchanges of so many micro-batches whose pairs go through these ports `[2, 2, D]`, (2) of `Costs`.

    A link class that nothing crosses takes no time.
    """
    near = np.maximum(ports[0, 0], ports[0, 1]).astype(np.float64)
    far = np.maximum(ports[1, 0], ports[1, 1]).astype(np.float64)
    near_s = costs.intra_s_per_byte * costs.copy_bytes * busiest(near, smooth)
    far_s = costs.inter_s_per_byte * costs.copy_bytes * busiest(far, smooth)
    near_s += costs.intra_latency_s * batches if near_s > 0 else 0.0
    far_s += costs.inter_latency_s * batches if far_s > 0 else 0.0
    return EXCHANGES * max(near_s, far_s)


@compiled
def sums_seconds(rows: Floats, costs: Costs, smooth: bool) -> float:
    """Seconds of gradient sums of so many rows by link class and device `[2, D]`, (3) of `Costs`."""
    near_s = costs.intra_sum_s_per_byte * busiest(rows[0], smooth)
    return costs.gradient_bytes * max(near_s, costs.inter_sum_s_per_byte * busiest(rows[1], smooth))


@compiled
def over_steps(figures: Floats, quantile: float) -> float:
    """Mean of the figures of several steps (0), or a quantile, as numpy's method "higher" has it."""
    if quantile == 0.0:
        return float(figures.mean())
    return float(np.sort(figures)[int(np.ceil(quantile * (len(figures) - 1)))])


@compiled
def link_ratio(costs: Costs) -> int:
    """Cost of a pair that crosses nodes over one that crosses devices, as `quota.split` takes it; 1 at no cost."""
    if costs.intra_s_per_byte <= 0:
        return 1
    return max(1, int(np.rint(costs.inter_s_per_byte / costs.intra_s_per_byte)))


@compiled
def judged(batches: Ints, holders: Holders, costs: Costs, rule: int) -> tuple[float, Floats]:
    """The mean balance of a step's micro-batches, each split on its own, and its seconds.

    Seconds are of experts, exchanges and sums, `[3]`.

    Parameters
    ----------
    batches
        Pairs by expert and source, `[M, E, D]`.
    rule
        Its number in `placement.DEALS`.
    """
    num_devices = batches.shape[2]
    seconds, balance = np.zeros(3), 0.0
    ratio = link_ratio(costs)
    for m in range(len(batches)):
        if rule == QUOTA:
            served, _ = shares(batches[m], holders, ratio)
            ports = served_ports(batches[m], served, holders)
        else:
            by_source = dealt(batches[m], holders, rule, ratio)
            served, ports = by_source.sum(axis=1), pair_ports(by_source, holders)
        load = np.zeros(num_devices, np.int64)
        for p in range(len(served)):
            load[holders.device[p]] += served[p]
        balance += load.max() * num_devices / max(load.sum(), 1)
        seconds[0] += costs.pair_s * load.max()
        seconds[1] += exchange_seconds(ports, costs, 1, False)
    seconds[2] = sums_seconds(sum_ports(holders), costs, False)
    return balance / len(batches), seconds
