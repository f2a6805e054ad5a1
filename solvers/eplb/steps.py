"""Placements refined for steps: what is waited for is the busiest device of each, not of their mean.

Legend: B steps; L MoE layers; E experts per layer; P slots on D devices; N nodes.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...workers import Workers, given
from ..arrays import Bools, Floats, Ints
from ..balance import step_balance
from ..placement import Placement

WORK = 100_000_000  # loads to look at, a layer
SEED = 0
RESAMPLED = 16  # so that they matter among few steps, and hardly among many


def even_mean(loads: Floats, num_devices: int) -> Floats:
    """The mean of steps `[B, L, E]` that weigh alike, `[L, E]`: 1 a device in every step and layer with load."""
    return np.array([_even(loads[:, layer], num_devices).mean(axis=0) for layer in range(loads.shape[1])])


def with_resampled(loads: Floats) -> Floats:
    """Steps `[B, L, E]`, followed by means of B steps drawn from them with replacement.

    Devices that are even in all of these are even in what the steps have in common, not by the chance of a few.
    """
    drawn = np.random.default_rng(SEED).integers(0, len(loads), (RESAMPLED, len(loads)))
    return np.concatenate([loads, [loads[chosen].mean(axis=0) for chosen in drawn]])


def step_refined(
    loads: Floats,
    starts: list[Placement],
    pinned: Bools,
    num_nodes: int,
    quantile: float | None,
    workers: Workers | None,
) -> Placement:
    """A placement better for steps, layer by layer, than the best of some, no expert on a node that it was not on.

    Parameters
    ----------
    loads
        `[B, L, E]`.
    pinned
        Whether a device must hold an expert, `[D, E]`.
    num_nodes
        N; 1: experts go anywhere.
    quantile
        Of the steps, what is lowered; None: their mean.

    Notes
    -----
    Work is capped a layer, at about 0.2 s of a core, so that its time does not grow with B for long; what does is
    preparation. A change is dropped early where it gains nothing in 256 steps drawn at random (of 1000, max/mean ends
    .002 higher for that, at a third of the time), and taken by all steps alone.
    """
    order_B = np.random.default_rng(SEED).permutation(len(loads))
    layers = (
        (loads[order_B, layer], [layer_of(start, layer) for start in starts], pinned, num_nodes, quantile)
        for layer in range(loads.shape[1])
    )
    with given(workers) as there:
        return replace(starts[0], physical_to_logical=np.concatenate([*there.map(_refined_layer, layers)]))


def _refined_layer(
    load_BE: Floats, rows: list[Placement], pinned: Bools, num_nodes: int, quantile: float | None
) -> NDArray[np.int32]:
    """The best table `[1, P]` of one layer, from its placements."""
    load_BLE = _even(load_BE[:, None], int(np.count_nonzero(rows[0].slots)))
    for each in dict.fromkeys((None, quantile)):  # of steps' mean first, which leads to good quantiles
        best = min(rows, key=lambda one: step_balance(load_BLE, one, quantile))
        rows = [*rows, _changed(load_BLE[:, 0], best, pinned, num_nodes, each)]
    return min(rows, key=lambda one: step_balance(load_BLE, one, quantile)).physical_to_logical


def nodes_held(row: Placement, num_nodes: int) -> Bools:
    """Mask of devices whose node, of N, holds an expert in the placement of one layer, `[E, D]`."""
    on_node_EN = row.holds(0).reshape(row.num_experts, num_nodes, -1).any(axis=2)
    return np.repeat(on_node_EN, row.num_devices // num_nodes, axis=1)


def _even(loads: Floats, num_devices: int) -> Floats:
    """Loads `[..., E]` with a mean of 1 a device in every step that has any."""
    total = loads.sum(axis=-1, keepdims=True)
    return np.asarray(np.divide(loads * num_devices, total, out=np.zeros_like(loads), where=total > 0))


def layer_of(placement: Placement, layer: int) -> Placement:
    """The placement of one layer alone."""
    return replace(placement, physical_to_logical=placement.physical_to_logical[layer : layer + 1])


def refilled(row: Placement, expert_P: Ints) -> Placement:
    """The placement of one layer with other experts in its slots, `[P]`, which ascend on every device."""
    cell_P = np.sort(row.device_of_slot * row.num_experts + expert_P)
    return replace(row, physical_to_logical=(cell_P % row.num_experts).astype(np.int32)[None])


def _changed(load_BE: Floats, row: Placement, pinned: Bools, num_nodes: int, quantile: float | None) -> Placement:
    """The placement of one layer after changes."""
    from .step_kernel import refine_steps

    num_steps = len(load_BE)
    above = -1 if quantile is None else num_steps - 1 - int(np.ceil(quantile * (num_steps - 1)))
    near_ED = nodes_held(row, num_nodes)
    first, expert_P = np.concatenate([[0], np.cumsum(row.slots)]), row.physical_to_logical[0].astype(np.int64)
    allowed_DE = np.ascontiguousarray(near_ED.T)
    load_EB = np.ascontiguousarray(load_BE.T)
    return refilled(row, refine_steps(load_EB, expert_P, first, pinned, allowed_DE, above, WORK))
