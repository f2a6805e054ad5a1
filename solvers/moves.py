"""Experts that move when one placement replaces another, and names of devices under which few do.

Legend: L MoE layers; D devices, S slots of each; N nodes of G devices.
"""

import numpy as np

from .arrays import Floats, Ints
from .assignment import assign_places
from .placement import Placement


def experts_moved(new: Placement, old: Placement) -> Ints:
    """Experts that a device holds in `new` and not in `old`, hence is sent, by layer `[L]`."""
    pairs = zip(map(new.holds, range(new.num_layers)), map(old.holds, range(old.num_layers)), strict=True)
    return np.array([np.count_nonzero(now_ED & ~before_ED) for now_ED, before_ED in pairs], np.int64)


def keep_in_place(new: Placement, old: Placement, devices_per_node: int) -> Placement:
    """`new` with its devices renamed, the same in all layers, so that the fewest experts move from `old`.

    Nodes trade names whole and devices inside them, so every transition and copy stays as near as it was.

    Raises
    ------
    ValueError
        The placements are of other layers, experts or devices.
    """
    if (new.num_layers, new.num_experts, new.num_devices) != (old.num_layers, old.num_experts, old.num_devices):
        raise ValueError(
            f"placements of {new.num_layers} and {old.num_layers} layers, {new.num_experts} and {old.num_experts}"
            f" experts, {new.num_devices} and {old.num_devices} devices; expected as many"
        )
    kept_DD = np.zeros((new.num_devices, new.num_devices))
    for layer in range(new.num_layers):
        kept_DD += new.holds(layer).T.astype(np.float64) @ old.holds(layer)
    label_D = best_labels(kept_DD, new.slots, devices_per_node)
    first_D = np.cumsum(new.slots) - new.slots
    column_P = np.concatenate([first_D[d] + np.arange(new.slots[d]) for d in np.argsort(label_D)])
    return Placement(new.physical_to_logical[:, column_P], new.slots, new.num_experts, new.replica_rule)


def best_labels(worth: Floats, slots: Ints, devices_per_node: int) -> Ints:
    """The new name of every device `[D]` such that the sum of `worth[d, name[d]]` is largest.

    Parameters
    ----------
    worth
        `[D, D]`, at least 0.
    slots
        `[D]`; devices trade names only with those of as many.

    Notes
    -----
    Exact in two stages, since nodes trade names whole: the best names inside every pair of nodes, N^2 assignment
    problems of G devices, decide what a pair is worth, and one of N nodes pairs them.
    """
    group = naming_group(len(worth), devices_per_node)
    num_nodes = len(worth) // group
    # Dearer than everything that could be kept: never taken, since leaving every name as it is takes none of it.
    never = worth.sum() + 1.0
    cost_DD = np.where(slots[:, None] != slots, never, -worth)
    cost_NNGG = cost_DD.reshape(num_nodes, group, num_nodes, group).swapaxes(1, 2)
    inner_NNG = np.empty((num_nodes, num_nodes, group), dtype=np.int64)
    for pair in np.ndindex(num_nodes, num_nodes):
        inner_NNG[pair] = assign_places(cost_NNGG[pair], np.arange(group))
    cost_NN = np.take_along_axis(cost_NNGG, inner_NNG[..., None], axis=3).sum(axis=(2, 3))
    node_N = assign_places(cost_NN, np.arange(num_nodes))
    label_NG = node_N[:, None] * group + inner_NNG[np.arange(num_nodes), node_N]
    return np.asarray(label_NG.ravel())


def naming_group(num_devices: int, devices_per_node: int) -> int:
    """Number of devices that trade names inside a node; nodes of one device are devices of one node."""
    return devices_per_node if devices_per_node > 1 else num_devices
