"""The paper's own scheduler and token routing (FlexMoE, Algorithms 1 to 3), corrected; compiled, as a baseline.

To be imported in the call that needs it.

Algorithm 3, whose capacities are whole numbers here, is `step_deals.capacity_deal`. Algorithm 2 shrinks no expert's
only replica, puts the new one where Eq. 5 is least, and no expert is on a device twice. Eq. 8 takes the busier
direction of every port.

Legend: E experts; D devices in nodes of G, S slots of each; P slots that hold an expert.
"""

import numpy as np

from ..arrays import Floats, Ints
from ..compiled import compiled
from .costs import EXCHANGES, Costs
from .state import holds

MOST = 64  # pairs of expand and shrink, a trigger


@compiled
def scheduled(table: Ints, pairs: Ints, group: int, costs: Costs, threshold: float, all_shrink: bool) -> Ints:
    """The table after Algorithm 1, for the pairs of a step `[E, D]`.

    Parameters
    ----------
    threshold
        Max/mean above which it acts.
    all_shrink
        Whether every expert with replicas may shrink; else the one of least load a replica.
    """
    now, num_experts = table.copy(), len(pairs)
    total = pairs.sum(axis=1)
    parts = np.zeros((num_experts, 5, len(table)))
    for e in range(num_experts):
        _part(parts[e], now, e, pairs, group, costs)
    for _ in range(MOST):
        seconds = parts.sum(axis=0)
        if seconds[0].max() <= threshold * seconds[0].mean() or not _expand(
            now, parts, total, pairs, group, costs, all_shrink
        ):
            break
    _migrate(now, parts, pairs, group, costs)
    return now


@compiled
def _part(part: Floats, table: Ints, expert: int, pairs: Ints, group: int, costs: Costs) -> None:
    """An expert's seconds on every device `[5, D]`: experts; ports inside and between nodes, sent and received.

    Sums count as if they were sent with the tokens.
    """
    num_devices = len(table)
    part[:] = 0.0
    at, n = np.empty(num_devices, np.int64), 0
    for d in range(num_devices):
        if (table[d] == expert).any():
            at[n] = d
            n += 1
    total, left = pairs[expert].sum(), np.empty(n, np.int64)
    rest = pairs[expert].copy()
    for i in range(n):
        left[i] = (total + n - 1 - i) // n
        part[0, at[i]] = costs.pair_s * left[i]
        own = min(left[i], rest[at[i]])
        left[i] -= own
        rest[at[i]] -= own
    room = max(left.sum(), 1)
    near_s = EXCHANGES * costs.copy_bytes * costs.intra_s_per_byte
    far_s = EXCHANGES * costs.copy_bytes * costs.inter_s_per_byte
    for g in range(num_devices):
        for i in range(n):
            some = rest[g] * left[i] / room
            if at[i] // group == g // group:
                part[1, g] += some * near_s
                part[2, at[i]] += some * near_s
            else:
                part[3, g] += some * far_s
                part[4, at[i]] += some * far_s
    for i in range(n):
        for j in range(n):
            rows = 2.0 * costs.gradient_bytes / n if i != j else 0.0
            if at[i] // group == at[j] // group:
                part[1, at[i]] += rows * costs.intra_sum_s_per_byte
                part[2, at[i]] += rows * costs.intra_sum_s_per_byte
            else:
                part[3, at[i]] += rows * costs.inter_sum_s_per_byte
                part[4, at[i]] += rows * costs.inter_sum_s_per_byte


@compiled
def _slowest(seconds: Floats) -> float:
    """Eq. 5: the slowest device, of seconds `[5, D]`."""
    most = 0.0
    for d in range(seconds.shape[1]):
        port = max(max(seconds[1, d], seconds[2, d]), max(seconds[3, d], seconds[4, d]))
        most = max(most, seconds[0, d] + port)
    return most


@compiled
def _expand(table: Ints, parts: Floats, total: Ints, pairs: Ints, group: int, costs: Costs, all_shrink: bool) -> bool:
    """Algorithm 2: expand the expert of most load a replica in a slot of one that shrinks; whether it helps."""
    num_experts, num_devices = len(total), len(table)
    held = holds(table, num_experts)
    count = held.sum(axis=0)
    each = total / count
    grown, least = each.argmax(), -1
    for e in range(num_experts):
        if count[e] > 1 and e != grown and (least < 0 or each[e] < each[least]):
            least = e
    whole = parts.sum(axis=0)
    best, where, slot = _slowest(whole), -1, -1
    new, less = np.empty((5, num_devices)), np.empty((5, num_devices))
    for d in range(num_devices):
        for s in range(table.shape[1]):
            e = table[d, s]
            if held[d, grown] or e < 0 or count[e] < 2 or not (all_shrink or e == least):
                continue
            table[d, s] = grown
            _part(new, table, grown, pairs, group, costs)
            _part(less, table, e, pairs, group, costs)
            seconds = _slowest(whole - parts[grown] - parts[e] + new + less)
            table[d, s] = e
            if seconds < best:
                best, where, slot = seconds, d, s
    if where < 0:
        return False
    shrunk = table[where, slot]
    table[where, slot] = grown
    _part(parts[grown], table, grown, pairs, group, costs)
    _part(parts[shrunk], table, shrunk, pairs, group, costs)
    return True


@compiled
def _migrate(table: Ints, parts: Floats, pairs: Ints, group: int, costs: Costs) -> None:
    """Make the trade of two slots that lowers Eq. 5 most, if one does."""
    num_devices, width = table.shape
    held, whole = holds(table, len(pairs)), parts.sum(axis=0)
    best, change = _slowest(whole), np.full(4, -1)
    one, two = np.empty((5, num_devices)), np.empty((5, num_devices))
    for d in range(num_devices):
        for g in range(d + 1, num_devices):
            for s in range(width):
                for t in range(width):
                    e, y = table[d, s], table[g, t]
                    if e < 0 or y < 0 or held[g, e] or held[d, y]:
                        continue
                    table[d, s], table[g, t] = y, e
                    _part(one, table, e, pairs, group, costs)
                    _part(two, table, y, pairs, group, costs)
                    seconds = _slowest(whole - parts[e] - parts[y] + one + two)
                    table[d, s], table[g, t] = e, y
                    if seconds < best:
                        best = seconds
                        change[0], change[1], change[2], change[3] = d, s, g, t
    if change[0] >= 0:
        d, s, g, t = change
        e, y = table[d, s], table[g, t]
        table[d, s], table[g, t] = y, e
