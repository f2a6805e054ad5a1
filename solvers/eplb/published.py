"""The published EPLB algorithm, all rows abreast, repaired or raw (DeepSeek).

Legend: R rows of e experts and p slots on G devices.
"""

import numpy as np
from numpy.typing import NDArray

from ..balance import replica_loads

__all__ = ["pack", "published"]


def published(
    load: NDArray[np.float64], slots: NDArray[np.int64], *, legal: bool = True
) -> tuple[NDArray[np.int64], int]:
    """The experts of every row, device by device, ascending, `[R, p]`, and the choices repaired.

    Parameters
    ----------
    load, slots
        `[R, e]` and `[G]`.
    legal
        Whether an expert may be on a device once only; raw, it may be there any number of times.

    Notes
    -----
    (1) Every surplus slot in turn becomes a replica of the expert with the highest load a replica. (2) Replicas,
    heaviest first, go to the least loaded device with room; where each takes one, they stay in their order. Repairs: in
    (1) an expert that every device could hold gets no more; in (2) devices that hold the expert are passed over, and
    where none is left, the slot is filled with another expert's replica.
    """
    num_slots = int(slots.sum())
    most = np.count_nonzero(slots) if legal else num_slots
    expert_Rp, repaired = _replicate(load, num_slots, int(most))
    table_Rp, moved = pack(load, expert_Rp, slots, legal=legal)
    return table_Rp, repaired + moved


def pack(
    load: NDArray[np.float64], expert: NDArray[np.int64], slots: NDArray[np.int64], *, legal: bool = True
) -> tuple[NDArray[np.int64], int]:
    """Replicas `[R, p]` packed: the experts device by device, ascending, and the choices repaired."""
    num_experts, replica_Rp = load.shape[1], replica_loads(load, expert)
    order_Rp = _order(replica_Rp, slots)
    expert_pR, replica_pR = (np.take_along_axis(x, order_Rp, axis=1).T.copy() for x in (expert, replica_Rp))
    packing = _Packing(load, slots)
    for expert_R, replica_R in zip(expert_pR, replica_pR, strict=True):
        expert_R += packing.put(expert_R, replica_R, legal=legal) * num_experts
    return np.sort(expert_pR.T, axis=1) % num_experts, packing.repaired


def _replicate(load: NDArray[np.float64], num_slots: int, most: int) -> tuple[NDArray[np.int64], int]:
    """The expert of every replica `[R, p]`, no expert more than `most` times, and how often that was in the way."""
    num_rows, num_experts = load.shape
    row_R, repaired = np.arange(num_rows), 0
    expert_Rp = np.tile(np.arange(num_slots) % num_experts, (num_rows, 1))
    count_Re, replica_Re = np.ones(load.shape), load.copy()
    for slot in range(num_experts, num_slots):
        chosen_R = replica_Re.argmax(axis=1)  # (1)
        count_R = count_Re[row_R, chosen_R]
        if count_R.max() >= most:
            repaired += int((count_R >= most).sum())
            chosen_R = np.where(count_Re < most, replica_Re, -1.0).argmax(axis=1)
            count_R = count_Re[row_R, chosen_R]
        expert_Rp[:, slot] = chosen_R
        count_Re[row_R, chosen_R] = count_R + 1
        replica_Re[row_R, chosen_R] = load[row_R, chosen_R] / (count_R + 1)
    return expert_Rp, repaired


def _order(replica_Rp: NDArray[np.float64], slots_G: NDArray[np.int64]) -> NDArray[np.int64]:
    """The replicas in the order of packing `[R, p]`: heaviest first, as they stand where every device takes one."""
    if slots_G.max() == 1:
        return np.tile(np.arange(replica_Rp.shape[1]), (len(replica_Rp), 1))
    return np.argsort(-replica_Rp, axis=1, kind="stable")


class _Packing:
    """Devices that replicas are put on; one without room weighs infinitely much. Cells are row x G + device."""

    def __init__(self, load_Re: NDArray[np.float64], slots_G: NDArray[np.int64]) -> None:
        num_rows, num_devices = len(load_Re), len(slots_G)
        self.repaired = 0
        self._load_Re, self._first_R = load_Re, np.arange(num_rows) * num_devices
        self._held_Ce = np.zeros((num_rows * num_devices, load_Re.shape[1]), dtype=np.bool_)
        self._free_C = np.tile(slots_G, num_rows)
        self._weight_RG = np.tile(np.where(slots_G > 0, 0.0, np.inf), (num_rows, 1))
        self._weight_C = self._weight_RG.ravel()  # the same memory

    def put(self, expert_R: NDArray[np.int64], replica_R: NDArray[np.float64], *, legal: bool) -> NDArray[np.int64]:
        """Put a replica of every row on a device, in some rows another expert's; the devices."""
        device_R = self._weight_RG.argmin(axis=1)  # (2)
        if legal:
            twice_R = self._held_Ce[self._first_R + device_R, expert_R]
            if twice_R.any():
                for row in np.flatnonzero(twice_R).tolist():
                    expert_R[row], device_R[row] = self._repair(row, expert_R[row], device_R[row])
            self._held_Ce[self._first_R + device_R, expert_R] = True
        cell_R = self._first_R + device_R
        self._weight_C[cell_R] += replica_R
        free_R = self._free_C[cell_R] - 1
        self._free_C[cell_R] = free_R
        if not free_R.all():
            self._weight_C[cell_R[free_R == 0]] = np.inf
        return np.asarray(device_R)

    def _repair(self, row: int, expert: int, device: int) -> tuple[int, int]:
        """The expert on another device, or another expert, where a device holds one already."""
        self.repaired += 1
        first = self._first_R[row]
        held_Ge = self._held_Ce[first : first + self._weight_RG.shape[1]]
        weight_G = np.where(held_Ge[:, expert], np.inf, self._weight_RG[row])
        other = int(weight_G.argmin())
        if np.isfinite(weight_G[other]):
            return expert, other
        load_e = self._load_Re[row] / np.maximum(held_Ge.sum(axis=0), 1)
        return int(np.where(held_Ge[device], -1.0, load_e).argmax()), device
