"""Owners of experts: of all holders of an expert, the device that has its parameters and its optimizer's state.

Legend: E experts; D devices.
"""

import numpy as np

from ...solvers.arrays import Bools, Ints


def owners_of(held_ED: Bools, before_E: Ints | None = None) -> Ints:
    """The device that owns each expert of a layer, int64 `[E]`: one of its holders, as many experts a device as can be.

    Experts with the fewest holders choose first, among holders that own the fewest, the lowest first.

    Parameters
    ----------
    held_ED
        Whether a device holds an expert.
    before_E
        Owners until now, which stay where they still hold their expert.
    """
    num_experts, num_devices = held_ED.shape
    owner_E = np.full(num_experts, -1)
    if before_E is not None:
        stays_E = held_ED[np.arange(num_experts), before_E]
        owner_E[stays_E] = before_E[stays_E]
    owned_D = np.bincount(owner_E[owner_E >= 0], minlength=num_devices)
    for expert in np.argsort(held_ED.sum(axis=1), kind="stable"):
        if owner_E[expert] < 0:
            holders = np.flatnonzero(held_ED[expert])
            owner_E[expert] = holders[owned_D[holders].argmin()]
            owned_D[owner_E[expert]] += 1
    return owner_E
