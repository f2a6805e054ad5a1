"""The state of an annealed layout and the swap that changes it, compiled.

To be imported in the call that needs it.

Legend: L MoE layers; P places a layer; D devices; N nodes (0: one level).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compiled import compiled, inlined

__all__ = ["State", "add_pulls", "swap"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Pulls = NDArray[np.int32]


class State(NamedTuple):
    """Weights as integers, the homes of all experts, and the pulls that follow from both.

    `after[l]` is W of layer pair (l, l + 1), `before[l]` its transpose, `beside[l]` the weights inside layer l (no
    layers: none). `pull[l, d, e]` sums the weights between expert e of layer l and all experts on device d of its own
    and the neighbouring layers; `node_pull` likewise. Expert e of layer l is on `home[l, e]`, in place `place[l, e]`,
    which `occupant[l]` inverts; device d owns the places `[first[d], first[d + 1])`. A pair on one device is worth
    `worth[0]` times its weight, on one node `worth[1]` besides. A device's sum of `load` stays within `cap[l]`.
    `twin[l, e]` numbers the expert that replicas share, -1 without; twins keep to different devices.
    """

    after: Pulls
    before: Pulls
    beside: Pulls
    worth: Floats
    group: int
    first: Ints
    load: Floats
    cap: Floats
    twin: Ints
    home: Ints
    place: Ints
    occupant: Ints
    held: Floats
    pull: Pulls
    node_pull: Pulls


@inlined
def swap(state: State, layer: int, a: int, b: int) -> None:
    """Let experts a and b of a layer change homes."""
    p, q = state.home[layer, a], state.home[layer, b]
    _move(state, layer, a, b, p, q, state.pull)
    if state.node_pull.shape[1] > 0 and p // state.group != q // state.group:
        _move(state, layer, a, b, p // state.group, q // state.group, state.node_pull)
    more = state.load[layer, b] - state.load[layer, a]
    state.held[layer, p] += more
    state.held[layer, q] -= more
    state.home[layer, a], state.home[layer, b] = q, p
    at, to = state.place[layer, a], state.place[layer, b]
    state.place[layer, a], state.place[layer, b] = to, at
    state.occupant[layer, at], state.occupant[layer, to] = b, a


@inlined
def _move(state: State, layer: int, a: int, b: int, p: int, q: int, pull: Pulls) -> None:
    """Move what expert a of a layer pulls from p to q, devices or nodes, and what b pulls from q to p."""
    if layer + 1 < len(pull):
        _shift(state.after[layer, a], state.after[layer, b], pull[layer + 1], p, q)
    if layer > 0:
        _shift(state.before[layer - 1, a], state.before[layer - 1, b], pull[layer - 1], p, q)
    if len(state.beside):
        _shift(state.beside[layer, a], state.beside[layer, b], pull[layer], p, q)


@compiled
def add_pulls(state: State) -> None:
    """Add up the pulls of a state whose pulls are zero."""
    num_layers, num_devices, _ = state.pull.shape
    for layer in range(num_layers):
        for device in range(num_devices):
            row = state.pull[layer, device]
            for at in range(state.first[device], state.first[device + 1]):
                if layer > 0:
                    _add(state.after[layer - 1, state.occupant[layer - 1, at]], row)
                if layer + 1 < num_layers:
                    _add(state.before[layer, state.occupant[layer + 1, at]], row)
                if len(state.beside):
                    _add(state.beside[layer, state.occupant[layer, at]], row)
            if state.node_pull.shape[1]:
                _add(row, state.node_pull[layer, device // state.group])


@compiled
def _add(weight: Pulls, row: Pulls) -> None:
    for e in range(len(row)):
        row[e] += weight[e]


@compiled
def _shift(weight_a: Pulls, weight_b: Pulls, pull: Pulls, p: int, q: int) -> None:
    """Move the pulls of an expert from p to q and of another from q to p."""
    pull_p, pull_q = pull[p], pull[q]
    for e in range(len(weight_a)):
        moved = weight_a[e] - weight_b[e]
        pull_q[e] += moved
        pull_p[e] -= moved
