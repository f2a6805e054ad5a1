"""What the steps of a search take, in nanoseconds of a core of 2024: the same on every machine, so that runs repeat."""

import math

import numpy as np

from ..moves import naming_group
from .programme import Programme

__all__ = ["PER_STEEP", "WIDEST", "block_work", "layer_work", "naming_work", "value_work"]

WIDEST = 4  # experts that a block move deals from each of two devices, at most
BLOCK = 2_000  # a block move
MOVE = 400  # and each of its layers
PER_PLACE = 0.05  # and each of its places, a pair of experts dealt
PER_WAY = 20  # and each way to deal
PER_WAYS = 0.12  # and each pair of ways of neighbouring layers
PER_STEEP = 1.5  # more where the pair is summed by itself (`messages.sum_over`)
STEP = 24_000  # a layer that is assigned or named anew, around the assignment solver
CALL = 6_000  # a call of the assignment solver
PER_CELL, PER_CELL_PLACE = 15, 1 / 40  # and each cell of its matrix, and each cell and place
PER_TRANSITION = 4  # a weight that is added to others


def block_work(programme: Programme) -> float:
    """Of a block move, mean over devices: up to `WIDEST` experts of each of two dealt anew in every layer."""
    slots = np.minimum(programme.slots[programme.slots > 0], WIDEST)
    return BLOCK + programme.num_layers * float(np.mean([_move_work(m, len(programme.places)) for m in slots]))


def layer_work(num_experts: int, num_places: int) -> float:
    """Of giving the experts of a layer places at their best, with what they are worth there."""
    return STEP + _assignment_work(num_experts, num_places)


def naming_work(programme: Programme) -> float:
    """Of naming the devices of a layer at their best for the layer before (`best_labels`)."""
    group = naming_group(len(programme.slots), programme.devices_per_node)
    num_nodes = len(programme.slots) // group
    inside, nodes = _assignment_work(group, group), _assignment_work(num_nodes, num_nodes)
    return STEP + num_nodes**2 * inside + nodes + value_work(programme)


def value_work(programme: Programme) -> float:
    """Of what a layer pair keeps, for a layout."""
    return PER_TRANSITION * max(programme.sizes) ** 2


def _assignment_work(rows: int, num_places: int) -> float:
    """Of solving an assignment problem."""
    return CALL + rows * num_places * (PER_CELL + PER_CELL_PLACE * num_places)


def _move_work(m: int, num_places: int) -> float:
    """Of dealing 2 m experts of a layer anew."""
    ways = math.comb(2 * m, m)
    return MOVE + PER_PLACE * num_places * m**2 + PER_WAY * ways + PER_WAYS * ways**2
