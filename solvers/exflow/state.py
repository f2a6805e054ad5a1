"""The state of an annealed layout, as the kernel takes it.

Layers are padded with weightless experts to one a place, so that every move is a swap. To be imported in the call that
needs it (compiled).

Legend: L MoE layers; P places a layer; D devices.
"""

import numpy as np
from numpy.typing import NDArray

from .programme import Layout, Programme
from .pulls import State, add_pulls
from .terms import Terms

__all__ = ["moved", "state_of"]

LARGEST = 2.0**30  # no pull exceeds it
Ints = NDArray[np.int64]
Pulls = NDArray[np.int32]


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


def _integers(after: NDArray[np.float64], beside: NDArray[np.float64]) -> tuple[Pulls, Pulls, float]:
    """The weights times a scale, rounded, and the scale: 1 for small integers."""
    incident = np.zeros((len(after) + 1, after.shape[-1]))
    incident[:-1] += after.sum(axis=2)
    incident[1:] += after.sum(axis=1)
    incident[: len(beside)] += beside.sum(axis=2)
    scale = LARGEST / max(float(incident.max(initial=0.0)), LARGEST * np.finfo(np.float64).tiny)
    if scale >= 1 and all((weight == np.rint(weight)).all() for weight in (after, beside)):
        scale = 1.0
    return np.rint(after * scale).astype(np.int32), np.rint(beside * scale).astype(np.int32), scale


def _padded(programme: Programme, beside: NDArray[np.float64] | None) -> tuple[NDArray[np.float64], ...]:
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
