"""The published EPLB algorithm, all rows abreast, repaired or raw (DeepSeek), and the node that each group lives on.

Legend: R rows of e experts and p slots on G devices; L MoE layers; E experts per layer; P slots of D devices; N nodes
of G devices; Q groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...profilers.cluster import Cluster
from ..arrays import Bools, Floats, Ints, checked_counts
from ..balance import max_over_mean, replica_loads
from ..placement import slots_for
from .rows import Rows, has_form, lowest_max, pinned_groups, refined, with_pins

MOST_WAYS = 1000  # to deal groups to nodes, of which the best is taken


def published(load: Floats, slots: Ints, *, legal: bool = True) -> tuple[Ints, int]:
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


def pack(load: Floats, expert: Ints, slots: Ints, *, legal: bool = True) -> tuple[Ints, int]:
    """Replicas `[R, p]` packed: the experts device by device, ascending, and the choices repaired."""
    num_experts, replica_Rp = load.shape[1], replica_loads(load, expert)
    order_Rp = _order(replica_Rp, slots)
    expert_pR, replica_pR = (np.take_along_axis(x, order_Rp, axis=1).T.copy() for x in (expert, replica_Rp))
    packing = _Packing(load, slots)
    for expert_R, replica_R in zip(expert_pR, replica_pR, strict=True):
        expert_R += packing.put(expert_R, replica_R, legal=legal) * num_experts
    return np.sort(expert_pR.T, axis=1) % num_experts, packing.repaired


def _replicate(load: Floats, num_slots: int, most: int) -> tuple[Ints, int]:
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


def _order(replica_Rp: Floats, slots_G: Ints) -> Ints:
    """The replicas in the order of packing `[R, p]`: heaviest first, as they stand where every device takes one."""
    if slots_G.max() == 1:
        return np.tile(np.arange(replica_Rp.shape[1]), (len(replica_Rp), 1))
    return np.argsort(-replica_Rp, axis=1, kind="stable")


class _Packing:
    """Devices that replicas are put on; one without room weighs infinitely much. Cells are row x G + device."""

    def __init__(self, load_Re: Floats, slots_G: Ints) -> None:
        num_rows, num_devices = len(load_Re), len(slots_G)
        self.repaired = 0
        self._load_Re, self._first_R = load_Re, np.arange(num_rows) * num_devices
        self._held_Ce = np.zeros((num_rows * num_devices, load_Re.shape[1]), dtype=np.bool_)
        self._free_C = np.tile(slots_G, num_rows)
        self._weight_RG = np.tile(np.where(slots_G > 0, 0.0, np.inf), (num_rows, 1))
        self._weight_C = self._weight_RG.ravel()  # the same memory

    def put(self, expert_R: Ints, replica_R: Floats, *, legal: bool) -> Ints:
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


def published_groups(loads: Floats, slots: Ints, pinned: Bools, num_nodes: int, num_groups: int | None) -> Ints | None:
    """The groups of every node, ascending, `[L, N, Q / N]`, as published; None where there is no hierarchical form.

    Groups, heaviest first, go to the least loaded node with room for one more, each node taking as many.
    """
    if num_groups is None or not has_form(slots, pinned, num_nodes, num_groups):
        return None
    load_LQ = _group_loads(loads, num_groups)
    room_N = np.full(num_nodes, num_groups // num_nodes)
    group_LQ, _ = pack(load_LQ, np.tile(np.arange(num_groups), (len(loads), 1)), room_N)
    pinned_NQ = pinned_groups(pinned, num_nodes, num_groups)
    pinned_LNQ = np.broadcast_to(pinned_NQ, (len(loads), *pinned_NQ.shape))
    return with_pins(group_LQ, load_LQ, room_N, pinned_LNQ).reshape(len(loads), num_nodes, -1)


def refined_groups(loads: Floats, pinned: Bools, published: Ints) -> Ints:
    """The groups of every node, ascending, the published way refined for less load of the busiest node."""
    num_layers, num_nodes, each = published.shape
    load_LQ = _group_loads(loads, num_nodes * each)
    rows = Rows.of(load_LQ, np.full(num_nodes, each), pinned_groups(pinned, num_nodes, num_nodes * each), None)
    return refined(rows, published.reshape(num_layers, -1), num_layers).reshape(published.shape)


class Deal(NamedTuple):
    """The groups of every node, ascending, `[L, N, Q / N]`, and the load that no busiest device is below, `[L]`."""

    groups: Ints
    least: Floats


def dealt_best(loads: Floats, slots: Ints, num_nodes: int, each: int) -> Deal | None:
    """The best of all ways to deal groups to nodes, so many to each; None where there are too many.

    A node is worth the bound on its own busiest device (`lowest_max`).
    """
    num_layers, num_groups = len(loads), num_nodes * each
    if factorial(num_groups) > MOST_WAYS * factorial(each) ** num_nodes * factorial(num_nodes):
        return None
    node_C = list(combinations(range(num_groups), each))
    load_LCe = loads.reshape(num_layers, num_groups, -1)[:, np.array(node_C)].reshape(num_layers * len(node_C), -1)
    least_LC = lowest_max(load_LCe, slots[: len(slots) // num_nodes]).reshape(num_layers, -1)
    at = {node: c for c, node in enumerate(node_C)}
    way_WN = np.array([[at[node] for node in way] for way in _ways(tuple(range(num_groups)), each)])
    busiest_LW = least_LC[:, way_WN].max(axis=2)
    return Deal(np.array(node_C)[way_WN[busiest_LW.argmin(axis=1)]], busiest_LW.min(axis=1))


def _group_loads(loads: Floats, num_groups: int) -> Floats:
    return np.asarray(loads.reshape(len(loads), num_groups, -1).sum(axis=2))


def _ways(groups: tuple[int, ...], each: int) -> Iterator[list[tuple[int, ...]]]:
    """The ways to deal groups to nodes alike, so many to each."""
    if not groups:
        yield []
    for others in combinations(groups[1:], each - 1) if groups else ():
        node = (groups[0], *others)
        yield from ([node, *rest] for rest in _ways(tuple(q for q in groups if q not in node), each))


@dataclass(frozen=True, slots=True)
class RawBalance:
    """Balance of the published placement."""

    balance: float  #: The mean over layers of max/mean device load
    duplicates: int  #: Slots in all layers whose expert is on the same device already: no engine may load such a plan


def raw_balance(
    loads: ArrayLike,
    cluster: Cluster,
    *,
    slots: int | Sequence[int] | NDArray[np.integer] | None = None,
    num_groups: int | None = None,
) -> RawBalance:
    """Balance of `solve` with method "published", were nothing repaired. Parameters and errors are those of `solve`."""
    loads_LE = checked_counts(loads, "loads", (None, None))
    num_layers, num_experts = loads_LE.shape
    slots_D = slots_for(num_experts, cluster.num_devices, slots)
    free_DE = np.zeros((len(slots_D), num_experts), dtype=np.bool_)
    groups_LNQ = published_groups(loads_LE, slots_D, free_DE, cluster.num_nodes, num_groups)
    rows = Rows.of(loads_LE, slots_D, free_DE, groups_LNQ)
    table_Rp, _ = published(rows.load, rows.slots, legal=False)
    expert_LP = np.take_along_axis(rows.member, table_Rp, axis=1).reshape(num_layers, -1)
    device_P = np.repeat(np.arange(len(slots_D)), slots_D)
    load_LD = np.zeros((num_layers, len(slots_D)))
    np.add.at(load_LD, (np.arange(num_layers)[:, None], device_P), replica_loads(loads_LE, expert_LP))
    ratio_L = max_over_mean(load_LD[:, slots_D > 0])
    twice = (np.diff(expert_LP, axis=1) == 0) & (np.diff(device_P) == 0)
    return RawBalance(float(ratio_L.mean()), int(twice.sum()))
