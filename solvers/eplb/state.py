"""The state of a row's placement, as the kernel changes it, compiled.

To be imported in the call that needs it.

Legend: e experts; p slots on G devices.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compiled import compiled

__all__ = ["State", "place", "replace", "state_of", "swap"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


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
