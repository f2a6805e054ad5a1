"""Replicas for the slots that the experts' homes leave free.

Legend: L MoE layers; E experts a layer; D devices, S slots of each.
"""

import numpy as np
from numpy.typing import NDArray

from ..placement import Placement
from .programme import Layout, Programme

__all__ = ["with_replicas"]


def with_replicas(programme: Programme, layout: Layout, loads: NDArray[np.float64]) -> Placement:
    """The placement of `layout` whose free slots hold replicas of the highest loads.

    Parameters
    ----------
    loads
        `[L, E]`.

    Notes
    -----
    Each free slot goes to the expert with the highest load a replica that some device with room lacks, on the device
    where its transitions stay nearest. Since no device has more than E slots, every slot finds one.
    """
    held_LED = np.stack([np.eye(len(programme.slots), dtype=np.bool_)[device_E] for device_E in layout])
    for layer, load_E in enumerate(loads):
        _fill(held_LED[layer], programme.slots, load_E, _worth(programme, held_LED, layer))
    experts = [[np.flatnonzero(held_E).tolist() for held_E in held_ED.T] for held_ED in held_LED]
    return Placement.from_sets(experts, loads.shape[1])


def _fill(
    held_ED: NDArray[np.bool_], slots_D: NDArray[np.int64], load_E: NDArray[np.float64], worth_ED: NDArray[np.float64]
) -> None:
    """Fill one layer's free slots, in place."""
    free_D = slots_D - held_ED.sum(axis=0)
    for _ in range(int(free_D.sum())):
        allowed_ED = ~held_ED & (free_D > 0)
        a_replica_E = np.where(allowed_ED.any(axis=1), load_E / held_ED.sum(axis=1), -1.0)
        expert = int(a_replica_E.argmax())
        device = int(np.where(allowed_ED[expert], worth_ED[expert], -1.0).argmax())
        held_ED[expert, device] = True
        free_D[device] -= 1


def _worth(programme: Programme, held_LED: NDArray[np.bool_], layer: int) -> NDArray[np.float64]:
    """What a replica is worth on each device given the neighbouring layers as they stand, `[E, D]`."""
    worth_ED = np.zeros(held_LED.shape[1:])
    if layer > 0:
        shared_ED = held_LED[layer - 1] / held_LED[layer - 1].sum(axis=1, keepdims=True)
        worth_ED += programme.weights[layer - 1].T @ (shared_ED @ programme.near)
    if layer < programme.num_layers - 1:
        worth_ED += programme.weights[layer] @ (held_LED[layer + 1] @ programme.near)
    return worth_ED
