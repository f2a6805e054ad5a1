"""Replicas looked up one expert at a time: which holder of its experts every token takes by itself.

Legend: R rows; K experts per token; E experts.
"""

import numpy as np
from numpy.typing import NDArray

from ...solvers.placement import Placement

Numbers = NDArray[np.int64]
Holders = list[list[list[int]]]  # [layer][expert] -> devices, ascending


def holders_of(placement: Placement) -> Holders:
    """The devices that hold each expert."""
    device_P = [device for device, width in enumerate(placement.slots.tolist()) for _ in range(width)]
    layers: Holders = []
    for row in placement.physical_to_logical.tolist():
        held: list[list[int]] = [[] for _ in range(placement.num_experts)]
        for device, expert in zip(device_P, row, strict=True):
            held[expert].append(device)
        layers.append(held)
    return layers


def devices_of(
    ids_RK: NDArray[np.integer], holders: list[list[int]], rule: str, here_R: Numbers, turn_R: Numbers, group: int
) -> Numbers:
    """The device that every routed cell goes to `[R, K]`, -1 where not routed; replicated experts one by one."""
    only_E = np.array([*(held[0] for held in holders), -1])  # the last is of cells not routed
    device_RK = only_E[np.minimum(ids_RK, len(holders))]
    for expert in (expert for expert, held in enumerate(holders) if len(held) > 1):
        row, choice = np.nonzero(ids_RK == expert)
        device_RK[row, choice] = _taken(rule, expert, holders[expert], here_R[row], turn_R[row], group)
    return np.asarray(device_RK)


def _taken(rule: str, expert: int, holders: list[int], here_R: Numbers, turn_R: Numbers, group: int) -> Numbers:
    """The holder of an expert that each row takes; by the rules even and round_robin all holders take turns.

    Nearest: its own, else its node's take turns, else all. Static: its own, else the first of its node where others
    have some, else one: for the i-th device that asks so, number (i + expert) mod n.
    """
    held, own = np.array(holders), {*holders}
    if rule in ("even", "round_robin"):
        return np.asarray(held[(turn_R + (here_R + expert) * (rule == "round_robin")) % len(held)])
    nodes = {device // group for device in holders}
    if rule == "static":
        apart = nodes if len(nodes) > 1 else ()
        asking = [device for device in range(here_R.max(initial=-1)) if not (device in own or device // group in apart)]
        turn_R = np.searchsorted(asking, here_R) + expert
    taken_R = held[turn_R % len(held)]
    for node in nodes if len(nodes) > 1 else ():
        near, on_R = held[held // group == node], here_R // group == node
        taken_R[on_R] = near[0] if rule == "static" else near[turn_R[on_R] % len(near)]
    return np.where(np.isin(here_R, held), here_R, taken_R)
