"""The state of an annealed layout and the swap that changes it, compiled.

To be imported in the call that needs it.

Legend: L MoE layers; P places a layer; D devices; N nodes (0: one level).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compiled import compiled

__all__ = ["Ints", "Pulls", "State", "add_pulls", "swap"]

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
    `twin[l, e]` numbers the expert that replicas share, -1 without; twins keep to different devices. `tied` says that
    devices may not trade names: there are caps or twins, or more was added to the pulls.
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
    tied: bool
    home: Ints
    place: Ints
    occupant: Ints
    held: Floats
    pull: Pulls
    node_pull: Pulls


@compiled
def swap(state: State, swaps: Ints) -> None:
    """Let experts change homes, one of the swaps `(layer, a, b)` after the other.

    Arrays are taken out of the state once: it takes as long as half a swap.
    """
    pull, near, group = state.pull, state.node_pull, state.group
    after, before, beside = state.after, state.before, state.beside
    home, place, occupant, held, load = state.home, state.place, state.occupant, state.held, state.load
    for k in range(len(swaps)):
        layer, a, b = swaps[k]
        p, q = home[layer, a], home[layer, b]
        _move(after, before, beside, pull, layer, a, b, p, q)
        if near.shape[1] > 0 and p // group != q // group:
            _move(after, before, beside, near, layer, a, b, p // group, q // group)
        more = load[layer, b] - load[layer, a]
        held[layer, p] += more
        held[layer, q] -= more
        home[layer, a], home[layer, b] = q, p
        at, to = place[layer, a], place[layer, b]
        place[layer, a], place[layer, b] = to, at
        occupant[layer, at], occupant[layer, to] = b, a


@compiled
def _move(after: Pulls, before: Pulls, beside: Pulls, pull: Pulls, layer: int, a: int, b: int, p: int, q: int) -> None:
    """Move what expert a of a layer pulls from p to q, devices or nodes, and what b pulls from q to p."""
    if layer + 1 < len(pull):
        _shift(after, layer, a, b, pull, layer + 1, p, q)
    if layer > 0:
        _shift(before, layer - 1, a, b, pull, layer - 1, p, q)
    if len(beside):
        _shift(beside, layer, a, b, pull, layer, p, q)


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
def _shift(weight: Pulls, layer: int, a: int, b: int, pull: Pulls, to: int, p: int, q: int) -> None:
    """Move the pulls of expert a on layer `to` from p to q, and those of b back; by indices, quicker than rows."""
    for e in range(weight.shape[2]):
        moved = weight[layer, a, e] - weight[layer, b, e]
        pull[to, q, e] += moved
        pull[to, p, e] -= moved
