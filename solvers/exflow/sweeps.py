"""Sweeps: steps that never lose value, repeated until none gains.

Legend: E experts a layer; D devices; N nodes of G devices.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ..assignment import assign_places
from .budget import Budget
from .programme import Layout, Programme

__all__ = ["best_labels", "polish", "relabel", "sweep"]

OVERHEAD = 1500  # cells of work that a call of the assignment solver amounts to
TOLERANCE = 1e-12  # gains below this share of what is at stake are rounding


def polish(programme: Programme, layout: Layout, budget: Budget) -> None:
    """Sweep and relabel, in place, until neither gains or time runs out."""
    gained = True
    while gained and not budget.late:
        sweep(programme, layout, budget, range(programme.num_layers))
        gained = relabel(programme, layout, budget)


def sweep(programme: Programme, layout: Layout, budget: Budget, layers: Iterable[int]) -> None:
    """Reassign `layers` and whatever they unsettle, up and down, until no layer gains or time runs out.

    Notes
    -----
    One layer between two fixed neighbours is a transportation problem, solved exactly.
    """
    waiting, upward = set(layers), True
    while waiting:
        for layer in sorted(waiting, reverse=not upward):
            if budget.late:
                return
            waiting.discard(layer)
            if _reassign(programme, layout, layer, budget):
                waiting.update(near for near in (layer - 1, layer + 1) if 0 <= near < programme.num_layers)
        upward = not upward


def relabel(programme: Programme, layout: Layout, budget: Budget) -> bool:
    """Rename the devices of all layers beyond each cut at their best, in place; whether that gained.

    Notes
    -----
    Renaming changes no cut but this one, since `near` is blind to which node and which of its devices is which.
    """
    gained = False
    num_devices = len(programme.slots)
    for cut, weight_EE in enumerate(programme.weights):
        if budget.late:
            break
        pair_EE = layout[cut][:, None] * num_devices + layout[cut + 1]
        flow_DD = np.bincount(pair_EE.ravel(), weight_EE.ravel(), num_devices**2).reshape(num_devices, num_devices)
        worth_DD = flow_DD.T @ programme.near  # [name now, name then]
        label_D = best_labels(worth_DD, programme)
        budget.spend(num_devices**2 + OVERHEAD)
        if _gains(worth_DD, label_D, np.arange(num_devices)):
            layout[cut + 1 :] = [label_D[device_E] for device_E in layout[cut + 1 :]]
            gained = True
    return gained


def _reassign(programme: Programme, layout: Layout, layer: int, budget: Budget) -> bool:
    """Give one layer its best homes, in place; whether that gained."""
    worth_ED = programme.worth(layout, layer)
    found_E = assign_places(-worth_ED, programme.places)
    budget.spend(len(found_E) * len(programme.places) + OVERHEAD)
    if not _gains(worth_ED, found_E, layout[layer]):
        return False
    layout[layer] = found_E
    return True


def _gains(worth: NDArray[np.float64], found: NDArray[np.int64], held: NDArray[np.int64]) -> bool:
    """Whether giving row i column `found[i]` is worth more than `held[i]`, beyond rounding."""
    row = np.arange(len(worth))
    now = float(worth[row, held].sum())
    return float(worth[row, found].sum()) > now + TOLERANCE * abs(now)


def best_labels(worth_DD: NDArray[np.float64], programme: Programme) -> NDArray[np.int64]:
    """The new name of every device `[D]`: nodes trade places whole, devices inside them, all for equal slots only."""
    group = programme.devices_per_node
    num_nodes = len(worth_DD) // group
    unequal_DD = programme.slots[:, None] != programme.slots
    # Dearer than everything that could be kept: never taken, since leaving every name as it is takes none of it.
    never = worth_DD.sum() + 1.0
    cost_NNGG = np.where(unequal_DD, never, -worth_DD).reshape(num_nodes, group, num_nodes, group)
    cost_NNGG = cost_NNGG.swapaxes(1, 2)
    inner_NNG = np.empty((num_nodes, num_nodes, group), dtype=np.int64)
    for node in np.ndindex(num_nodes, num_nodes):
        inner_NNG[node] = assign_places(cost_NNGG[node], np.arange(group))
    cost_NN = np.take_along_axis(cost_NNGG, inner_NNG[..., None], axis=3).sum(axis=(2, 3))
    node_N = assign_places(cost_NN, np.arange(num_nodes))
    label_NG = node_N[:, None] * group + inner_NNG[np.arange(num_nodes), node_N]
    return np.asarray(label_NG.ravel())
