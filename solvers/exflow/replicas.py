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
    Each free slot in turn goes to the expert with the highest load a replica, on the device with room where its
    transitions stay nearest. Where every device with room holds that expert already, another expert moves there and
    leaves it its slot.
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
    for _ in range(int(slots_D.sum() - held_ED.sum())):
        count_E, room_D = held_ED.sum(axis=1), held_ED.sum(axis=0) < slots_D
        for expert in np.argsort(-load_E / count_E, kind="stable"):
            if (open_D := room_D & ~held_ED[expert]).any():
                device = int(np.where(open_D, worth_ED[expert], -1.0).argmax())
                break
            if (move := _cheapest_move(held_ED, expert, room_D, slots_D, worth_ED)) is not None:
                moved, device, target = move
                held_ED[moved, [device, target]] = False, True
                break
        held_ED[expert, device] = True


def _cheapest_move(
    held_ED: NDArray[np.bool_],
    expert: int,
    room_D: NDArray[np.bool_],
    slots_D: NDArray[np.int64],
    worth_ED: NDArray[np.float64],
) -> tuple[int, int, int] | None:
    """Which other expert to move from which device to which with room, so that `expert` can take its place."""
    sources = np.flatnonzero(~held_ED[expert] & (slots_D > 0))
    targets = np.flatnonzero(room_D)
    movable_EUV = held_ED[:, sources, None] & ~held_ED[:, None, targets]
    if not movable_EUV.any():
        return None
    loss_EU = worth_ED[:, sources] - worth_ED[expert, sources]
    loss_EUV = np.where(movable_EUV, loss_EU[:, :, None] - worth_ED[:, None, targets], np.inf)
    moved, source, target = np.unravel_index(loss_EUV.argmin(), loss_EUV.shape)
    return int(moved), int(sources[source]), int(targets[target])


def _worth(programme: Programme, held_LED: NDArray[np.bool_], layer: int) -> NDArray[np.float64]:
    """What a replica is worth on each device given the neighbouring layers as they stand, `[E, D]`."""
    worth_ED = np.zeros(held_LED.shape[1:])
    if layer > 0:
        shared_ED = held_LED[layer - 1] / held_LED[layer - 1].sum(axis=1, keepdims=True)
        worth_ED += programme.weights[layer - 1].T @ (shared_ED @ programme.near)
    if layer < programme.num_layers - 1:
        worth_ED += programme.weights[layer] @ (held_LED[layer + 1] @ programme.near)
    return worth_ED
