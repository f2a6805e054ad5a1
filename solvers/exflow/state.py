"""The state of an annealed layout and the swap that changes it, compiled.

Layers are padded with weightless experts to one a place, so that every move is a swap. To be imported in the call that
needs it.

Legend: L MoE layers; P places a layer; D devices; N nodes (0: one level).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import Floats, Ints
from ..compiled import compiled
from .programme import Layout, Programme, Terms

Pulls = NDArray[np.int32]
LARGEST = 2.0**30  # no pull exceeds it


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


def state_of(programme: Programme, terms: Terms, layout: Layout) -> State:
    """The state of a layout."""
    num_layers, num_places, num_devices = programme.num_layers, len(programme.places), len(programme.slots)
    after, beside, scale = _integers(*_padded(programme, terms.beside))
    group, first = programme.devices_per_node, np.concatenate([[0], np.cumsum(programme.slots)])
    node_worth = programme.node_worth
    load, twin = np.zeros((num_layers, num_places)), np.full((num_layers, num_places), -1)
    for padded, given in ((load, terms.load), (twin, terms.twin)):
        if given is not None:
            padded[:, : given.shape[1]] = given
    nothing = np.zeros((num_layers, 0), np.int64)
    return moved(
        State(
            after=after,
            before=np.ascontiguousarray(after.transpose(0, 2, 1)),
            beside=beside,
            worth=np.array([float(programme.near[0, 0]) - node_worth, node_worth]) / scale,
            group=group,
            first=first,
            load=load,
            cap=np.full(num_layers, np.inf) if terms.cap is None else terms.cap,
            twin=twin,
            tied=terms.twin is not None or terms.cap is not None,
            home=nothing,
            place=nothing,
            occupant=nothing,
            held=np.zeros((num_layers, num_devices)),
            pull=np.zeros((num_layers, num_devices, num_places), np.int32),
            node_pull=np.zeros((num_layers, num_devices // group if node_worth else 0, num_places), np.int32),
        ),
        layout,
    )


def moved(state: State, layout: Layout) -> State:
    """The state of another layout, with the weights of this one."""
    places = np.repeat(np.arange(len(state.first) - 1), np.diff(state.first))
    place = np.stack([_places(device_E, state.first) for device_E in layout])
    state = state._replace(
        home=places[place],
        place=place,
        occupant=np.argsort(place, axis=1),
        held=np.zeros_like(state.held),
        pull=np.zeros_like(state.pull),
        node_pull=np.zeros_like(state.node_pull),
    )
    for held_D, home_P, load_P in zip(state.held, state.home, state.load, strict=True):
        np.add.at(held_D, home_P, load_P)
    add_pulls(state)
    return state


def _integers(after: Floats, beside: Floats) -> tuple[Pulls, Pulls, float]:
    """The weights times a scale, rounded, and the scale: 1 for small integers."""
    incident = np.zeros((len(after) + 1, after.shape[-1]))
    incident[:-1] += after.sum(axis=2)
    incident[1:] += after.sum(axis=1)
    incident[: len(beside)] += beside.sum(axis=2)
    scale = LARGEST / max(float(incident.max(initial=0.0)), LARGEST * np.finfo(np.float64).tiny)
    if scale >= 1 and all((weight == np.rint(weight)).all() for weight in (after, beside)):
        scale = 1.0
    return np.rint(after * scale).astype(np.int32), np.rint(beside * scale).astype(np.int32), scale


def _padded(programme: Programme, beside: Floats | None) -> tuple[Floats, ...]:
    """The weights between and inside layers with weightless experts, `[L-1, P, P]` and `[L or 0, P, P]`."""
    num_places = len(programme.places)
    after = np.zeros((len(programme.weights), num_places, num_places))
    for cut, weight_EE in enumerate(programme.weights):
        after[cut, : weight_EE.shape[0], : weight_EE.shape[1]] = weight_EE
    inside = np.zeros((0 if beside is None else len(beside), num_places, num_places))
    if beside is not None:
        inside[:, : beside.shape[1], : beside.shape[1]] = beside * (1 - np.eye(beside.shape[1]))
    return after, inside


def _places(device_E: Ints, first: Ints) -> Ints:
    """A place on its device for every expert, and the places left over, `[P]`."""
    order = np.argsort(device_E, kind="stable")
    ordinal = np.arange(len(order)) - np.searchsorted(device_E[order], device_E[order])
    place = np.empty(len(order), np.int64)
    place[order] = first[device_E[order]] + ordinal
    return np.concatenate([place, np.setdiff1d(np.arange(first[-1]), place)])
