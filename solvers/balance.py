"""Balance of a placement's loads: every expert's replicas share alike, or as each step is split (quota, lp).

Legend: L MoE layers; E experts per layer; P slots per layer; D devices; B steps.
"""

import numpy as np
from numpy.typing import NDArray

from .arrays import Floats
from .placement import BY_STEP, Placement


def balance(loads: Floats, placement: Placement) -> float:
    """The mean over layers of the busiest device's load over the mean of devices that have slots; 1 without load."""
    if splits_steps(placement):
        return float(step_ratios(loads[None], placement).mean())
    return float(max_over_mean(device_loads(loads, placement)[:, placement.slots > 0]).mean())


def step_balance(loads: Floats, placement: Placement, quantile: float | None = None) -> float:
    """The mean over layers of `step_ratios`' mean over steps, or of a quantile.

    Parameters
    ----------
    loads
        `[B, L, E]`.
    quantile
        The least ratio that this share of the steps does not exceed.
    """
    ratio_BL = step_ratios(loads, placement)
    if quantile is None:
        return float(ratio_BL.mean())
    return float(np.quantile(ratio_BL, quantile, axis=0, method="higher").mean())


def step_ratios(loads: Floats, placement: Placement) -> Floats:
    """Max/mean device load of every step and layer `[B, L]`, of devices that have slots; 1 without load."""
    if splits_steps(placement):
        from .step_split import split_ratios

        return split_ratios(loads, placement)
    ratio_BL = np.empty(loads.shape[:2])
    for layer in range(placement.num_layers):
        held_ED = placement.holds(layer)[:, placement.slots > 0]
        ratio_BL[:, layer] = max_over_mean(loads[:, layer] @ (held_ED / held_ED.sum(axis=1, keepdims=True)))
    return ratio_BL


def splits_steps(placement: Placement) -> bool:
    """Check whether the loads of devices go by those of all experts in a step."""
    return placement.has_replicas and placement.replica_rule in BY_STEP


def max_over_mean(loads: Floats, *, idle: float = 1.0) -> Floats:
    """The largest load along the last axis, of devices that have slots, over the mean; `idle` where all are 0."""
    mean = loads.mean(axis=-1)
    return np.asarray(np.divide(loads.max(axis=-1), mean, out=np.full(mean.shape, idle), where=mean > 0))


def replica_loads(loads: Floats, experts: NDArray[np.integer]) -> Floats:
    """The load of every replica `[L, P]`, for loads `[L, E]` and the expert in every slot `[L, P]`."""
    num_layers, num_experts = loads.shape
    cell_LP = np.arange(num_layers)[:, None] * num_experts + experts
    count_N = np.bincount(cell_LP.ravel(), minlength=loads.size)
    return np.asarray((loads.ravel() / np.maximum(count_N, 1))[cell_LP])


def device_loads(loads: Floats, placement: Placement) -> Floats:
    """The load of every device `[L, D]` for loads `[L, E]`."""
    load_LD = np.zeros((placement.num_layers, placement.num_devices))
    layer = np.arange(placement.num_layers)[:, None]
    np.add.at(load_LD, (layer, placement.device_of_slot), replica_loads(loads, placement.physical_to_logical))
    return load_LD
