"""Refinement of rows by swaps, moves of replicas and kicks, and the state that they change, compiled.

A row's busiest device is relieved until nothing relieves it: by swapping one of its experts with another device's, by
one replica more of one of its experts, in the slot of a replica elsewhere, or by one less. Then kicks: a few random
changes, from which the same leads on, to be undone where it leads to no better maximum.

To be imported in the call that needs it.

Legend: R rows; e experts; p slots on G devices.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import Bools, Floats, Ints
from ..compiled import compiled
from ..draws import SEED, below

MARGIN = 1 - 1e-12  # of the maximum: less of a gain is rounding
TRIES = 20


class State(NamedTuple):
    """A placement and the loads it gives.

    Constant: `weight [e]`; the slots of device d are `[first[d], first[d + 1])`, `first [G + 1]`, `device [p]`; cells
    `pinned [G, e]` stay. Changing: `expert [p]` in each slot; `held [G, e]`; how many replicas there are, `copies [e]`,
    on which devices, `at [e, G]`, and the load of one, `share [e]`; the loads of devices, `load [G]`.
    """

    weight: Floats
    first: Ints
    device: Ints
    pinned: Bools
    expert: Ints
    held: Bools
    copies: Ints
    at: Ints
    share: Floats
    load: Floats


@compiled
def state_of(weight: Floats, first: Ints, pinned: Bools) -> State:
    """A state with nothing placed."""
    num_devices, num_experts = pinned.shape
    device = np.empty(first[-1], np.int64)
    for d in range(num_devices):
        device[first[d] : first[d + 1]] = d
    return State(
        weight,
        first,
        device,
        pinned,
        np.zeros(len(device), np.int64),
        np.zeros((num_devices, num_experts), np.bool_),
        np.zeros(num_experts, np.int64),
        np.zeros((num_experts, num_devices), np.int64),
        np.zeros(num_experts),
        np.zeros(num_devices),
    )


@compiled
def place(state: State, expert: Ints) -> None:
    """Put these experts in the slots, `[p]`."""
    state.held[:] = False
    state.copies[:] = 0
    state.load[:] = 0
    for i, d in enumerate(state.device):
        x = expert[i]
        state.expert[i] = x
        state.held[d, x] = True
        state.at[x, state.copies[x]] = d
        state.copies[x] += 1
    for x in range(len(state.weight)):
        state.share[x] = state.weight[x] / state.copies[x]
    for i, d in enumerate(state.device):
        state.load[d] += state.share[expert[i]]


@compiled
def swap(state: State, i: int, j: int) -> None:
    """Swap the experts of two slots."""
    p, q, x, y = state.device[i], state.device[j], state.expert[i], state.expert[j]
    _move(state, x, p, q)
    _move(state, y, q, p)
    state.expert[i], state.expert[j] = y, x


@compiled
def replace(state: State, i: int, x: int) -> None:
    """Put another expert's replica in the slot of a replica, one of several."""
    d, y = state.device[i], state.expert[i]
    last = state.at[y, state.copies[y] - 1]
    _move(state, y, d, last)  # a slot on the last one's device twice, for now
    state.load[last] -= state.share[y]
    state.held[d, y] = False
    _spread(state, y, state.copies[y] - 1)
    state.at[x, state.copies[x]] = d
    state.load[d] += state.share[x]
    _spread(state, x, state.copies[x] + 1)
    state.held[d, x] = True
    state.expert[i] = x


@compiled
def _move(state: State, x: int, p: int, q: int) -> None:
    """Take a replica from p to q."""
    state.held[p, x] = False
    state.held[q, x] = True
    state.load[p] -= state.share[x]
    state.load[q] += state.share[x]
    k = 0
    while state.at[x, k] != p:
        k += 1
    state.at[x, k] = q


@compiled
def _spread(state: State, x: int, count: int) -> None:
    """Share an expert's load among so many devices, the first of those that it is on."""
    share = state.weight[x] / count
    for k in range(count):
        state.load[state.at[x, k]] += share - state.share[x]
    state.copies[x], state.share[x] = count, share


@compiled
def refine(load: Floats, table: Ints, first: Ints, pinned: Bools, target: Floats, work: int) -> Ints:
    """Better rows from legal ones, `[R, p]`; their devices' experts in any order.

    Parameters
    ----------
    load, table, pinned
        `[R, e]`, `[R, p]` and `[R, G, e]`.
    first
        The slots of device d are `[first[d], first[d + 1])`, `[G + 1]`.
    target
        Maximum loads that are good enough, `[R]`.
    work
        What may be done, a row: about as many pairs of slots looked at.
    """
    best = table.copy()
    for r in range(len(table)):
        state = state_of(load[r], first, pinned[r])
        place(state, table[r])
        left, seed = descend(state, target[r], work), np.array([SEED], np.uint64)
        best[r], most = state.expert, state.load.max()
        while left > 0 and most > target[r]:
            kick(state, seed)
            left = descend(state, target[r], left - state.held.size // 4)
            if state.load.max() <= most:
                best[r], most = state.expert, state.load.max()
            else:
                place(state, best[r])
    return best


@compiled
def descend(state: State, target: float, work: int) -> int:
    """Relieve the busiest device until nothing does or its load is good enough; the work left."""
    while work > 0:
        top = int(state.load.argmax())
        if state.load[top] <= target:
            break
        look = (state.first[top + 1] - state.first[top] + 3) * len(state.expert)
        work -= look
        i, j = best_swap(state, top)
        if i >= 0:
            swap(state, i, j)
            continue
        work -= look
        i, x = best_change(state, top)
        if i < 0:
            break
        replace(state, i, x)
    return work


@compiled
def best_swap(state: State, top: int) -> tuple[int, int]:
    """The two slots whose swap relieves the busiest device most, (-1, -1) where none does."""
    best, found, load = state.load[top] * MARGIN, (-1, -1), state.load
    for i in range(state.first[top], state.first[top + 1]):
        x = state.expert[i]
        if state.pinned[top, x]:
            continue
        for q in range(len(load)):
            if load[top] + load[q] >= 2 * best or state.held[q, x]:
                continue
            for j in range(state.first[q], state.first[q + 1]):
                y = state.expert[j]
                less = state.share[x] - state.share[y]
                most = max(load[top] - less, load[q] + less)
                if most < best and not (state.held[top, y] or state.pinned[q, y]):
                    best, found = most, (i, j)
    return found


@compiled
def best_change(state: State, top: int) -> tuple[int, int]:
    """The slot, and the expert to replace its own, that relieves the busiest device most; (-1, -1) where none does."""
    best, found, load = state.load[top] * MARGIN, (-1, -1), state.load
    for i, d in enumerate(state.device):
        y = state.expert[i]
        if state.copies[y] == 1 or state.pinned[d, y]:
            continue
        heavier, least = state.weight[y] / (state.copies[y] - 1) - state.share[y], load[d] - state.share[y]
        worst = 0.0
        for k in range(state.copies[y]):
            q = state.at[y, k]
            worst = max(worst, load[q] + heavier if q != d else 0.0)
        for at in range(len(state.weight) if d == top else state.first[top + 1] - state.first[top]):
            x = at if d == top else state.expert[state.first[top] + at]
            share = state.weight[x] / (state.copies[x] + 1)
            lighter = state.share[x] - share
            most = max(load[top] - lighter if d != top else 0.0, least + share, worst - lighter)
            if most < best and not state.held[d, x]:
                most = max(most, _others(state, y, d, x, heavier, lighter))
                if most < best:
                    best, found = most, (i, x)
    return found


@compiled
def _others(state: State, y: int, d: int, x: int, heavier: float, lighter: float) -> float:
    """The highest load of a device that keeps a replica of y when the one on d is x's."""
    most = 0.0
    for k in range(state.copies[y]):
        q = state.at[y, k]
        if q != d:
            most = max(most, state.load[q] + heavier - (lighter if state.held[q, x] else 0.0))
    return most


@compiled
def kick(state: State, seed: NDArray[np.uint64]) -> None:
    """Make one or two random changes: give an expert another replica, often a heavy one, or swap two slots twice."""
    for _ in range(1 + below(seed, 2)):
        if below(seed, 3) == 0 or not _replicate(state, seed):
            _swap_any(state, seed)
            _swap_any(state, seed)


@compiled
def _replicate(state: State, seed: NDArray[np.uint64]) -> bool:
    """Give a random expert, or the heaviest of a device, often the busiest, a random slot; whether one was found."""
    num_slots = len(state.expert)
    at = below(seed, num_slots)
    x = state.expert[at]
    if below(seed, 3) > 0:
        p = state.load.argmax() if below(seed, 2) else state.device[at]
        for i in range(state.first[p], state.first[p + 1]):
            if state.share[state.expert[i]] > state.share[x] or state.device[at] != p:
                x, at = state.expert[i], i
    for _ in range(TRIES):
        i = below(seed, num_slots)
        d, y = state.device[i], state.expert[i]
        if state.copies[y] > 1 and not (state.pinned[d, y] or state.held[d, x]):
            replace(state, i, x)
            return True
    return False


@compiled
def _swap_any(state: State, seed: NDArray[np.uint64]) -> None:
    """Swap two random slots, if that is legal."""
    i, j = below(seed, len(state.expert)), below(seed, len(state.expert))
    p, q, x, y = state.device[i], state.device[j], state.expert[i], state.expert[j]
    if not (state.held[q, x] or state.held[p, y] or state.pinned[p, x] or state.pinned[q, y]):
        swap(state, i, j)
