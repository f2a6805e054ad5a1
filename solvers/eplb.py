"""EPLB: replicas for the busiest experts, packed evenly (DeepSeek's published algorithm, hierarchical and global).

Legend: L MoE layers; E experts a layer; P slots a layer; D devices; N nodes (1 in the global form); R rows, one a layer
and node, of e = E / N experts and p = P / N slots on G = D / N devices.
"""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..profilers.cluster import Cluster
from .balance import balance, replica_loads
from .checked_counts import checked_counts
from .outcome import ROUNDING, Objective, Outcome, Status
from .placement import Placement, ReplicaRule, slots_for
from .result import PlacementResult

__all__ = ["solve"]


def solve(
    loads: ArrayLike,
    cluster: Cluster,
    *,
    slots: int | Sequence[int] | NDArray[np.integer] | None = None,
    num_groups: int | None = None,
) -> PlacementResult:
    """The placement of EPLB, repaired where it would put an expert twice on a device.

    Parameters
    ----------
    loads
        `[L, E]`, at least 0.
    slots
        S, one number for all devices or one a device; by default ceil(E / D).
    num_groups
        Groups of consecutive experts from which a token chooses few. Where they divide by several nodes of equal slots
        that can hold them, the form is hierarchical: no group is split between nodes. Else, and for None, it is global.

    Returns
    -------
    PlacementResult
        The objective is `balance`, the mean over layers of max/mean device load, every expert's load shared evenly by
        its replicas. `repaired` counts the choices that were changed.

    Raises
    ------
    ValueError
        Loads of wrong shape, negative or not finite.
    UsageError
        Slots that cannot hold the experts.

    Notes
    -----
    (0) In the hierarchical form groups, heaviest first, go to the least loaded node with room for one more, each node
    taking as many; what follows is done inside each node alone. (1) Every surplus slot in turn becomes a replica of the
    expert with the highest load a replica. (2) Replicas, heaviest first, go to the least loaded device with room; where
    each takes one, they stay in their order. Repairs: in (1) an expert that every device could hold gets no more; in
    (2) devices that hold the expert are passed over, and where none is left, the slot is filled with another expert's
    replica. Bound: (1) without (0) minimises the largest replica load, so no placement has max/mean below
    max(1, largest replica load / mean).
    """
    started = time.perf_counter()
    loads_LE = checked_counts(loads, "loads", (None, None))
    slots_D = slots_for(loads_LE.shape[1], cluster.num_devices, slots)
    num_nodes = cluster.num_nodes if _has_form(loads_LE.shape[1], slots_D, cluster.num_nodes, num_groups) else 1
    member_Re = _members(loads_LE, num_nodes, num_groups)
    placement, repaired = _place(loads_LE, member_Re, slots_D, num_nodes)
    value, bound = balance(loads_LE, placement), _bound(loads_LE, slots_D)
    outcome = Outcome.of(
        status=Status.FEASIBLE,
        objective=Objective("balance", value, "min"),
        bound=bound,
        bound_kind="mean and largest replica",
        proven=value <= bound * (1 + ROUNDING),
        started=started,
        backend="moeplan" if num_nodes == 1 else "moeplan hierarchical",
    )
    return PlacementResult(placement, outcome, repaired)


def _has_form(num_experts: int, slots_D: NDArray[np.int64], num_nodes: int, num_groups: int | None) -> bool:
    """Whether there is a hierarchical form: whole groups on nodes of equal slots, no more a device than its experts."""
    if num_groups is None or num_nodes == 1 or num_groups % num_nodes or num_experts % num_groups:
        return False
    slots_NG = slots_D.reshape(num_nodes, -1)
    return bool((slots_NG == slots_NG[0]).all() and slots_D.max() * num_nodes <= num_experts)


def _members(loads_LE: NDArray[np.float64], num_nodes: int, num_groups: int | None) -> NDArray[np.int64]:
    """The experts of every layer and node, ascending, `[R, e]`."""
    num_layers, num_experts = loads_LE.shape
    if num_nodes == 1 or num_groups is None:
        return np.tile(np.arange(num_experts), (num_layers, 1))
    group_LQ = loads_LE.reshape(num_layers, num_groups, -1).sum(axis=2)
    groups_LQ = np.tile(np.arange(num_groups), (num_layers, 1))
    held_LNQ, _ = _pack(group_LQ, groups_LQ, np.full(num_nodes, num_groups // num_nodes))  # (0)
    held_LNE = np.repeat(held_LNQ, num_experts // num_groups, axis=2)
    return np.nonzero(held_LNE)[2].reshape(num_layers * num_nodes, -1)


def _place(
    loads_LE: NDArray[np.float64], member_Re: NDArray[np.int64], slots_D: NDArray[np.int64], num_nodes: int
) -> tuple[Placement, int]:
    """The placement of each node's experts on its devices, and the choices repaired."""
    num_layers, num_experts = loads_LE.shape
    slots_G = slots_D[: len(slots_D) // num_nodes]
    load_Re = loads_LE[np.arange(num_layers).repeat(num_nodes)[:, None], member_Re]
    expert_Rp, repaired = _replicate(load_Re, int(slots_G.sum()), int((slots_G > 0).sum()))
    held_RGe, moved = _pack(load_Re, expert_Rp, slots_G)
    row_C, _, expert_C = np.nonzero(held_RGe)  # layer by layer, device by device, experts ascending
    table_LP = member_Re[row_C, expert_C].reshape(num_layers, -1).astype(np.int32)
    return Placement(table_LP, slots_D, num_experts, ReplicaRule.EVEN), repaired + moved


def _replicate(load_Re: NDArray[np.float64], num_slots: int, most: int) -> tuple[NDArray[np.int64], int]:
    """The expert of every replica `[R, p]`, no expert more than `most` times, and how often that was in the way."""
    num_rows, num_experts = load_Re.shape
    row_R, repaired = np.arange(num_rows), 0
    expert_Rp = np.tile(np.arange(num_slots) % num_experts, (num_rows, 1))
    count_Re, replica_Re = np.ones(load_Re.shape), load_Re.copy()
    for slot in range(num_experts, num_slots):
        published_R = replica_Re.argmax(axis=1)  # (1)
        chosen_R = published_R
        full_R = count_Re[row_R, published_R] >= most
        if full_R.any():
            repaired += int(full_R.sum())
            chosen_R = np.where(count_Re < most, replica_Re, -1.0).argmax(axis=1)
        expert_Rp[:, slot] = chosen_R
        count_Re[row_R, chosen_R] += 1
        replica_Re[row_R, chosen_R] = load_Re[row_R, chosen_R] / count_Re[row_R, chosen_R]
    return expert_Rp, repaired


def _bound(loads_LE: NDArray[np.float64], slots_D: NDArray[np.int64]) -> float:
    used = int((slots_D > 0).sum())
    expert_LP, _ = _replicate(loads_LE, int(slots_D.sum()), used)
    mean_L = loads_LE.sum(axis=1) / used
    largest_L = replica_loads(loads_LE, expert_LP).max(axis=1)
    ratio_L = np.divide(largest_L, mean_L, out=np.ones_like(mean_L), where=mean_L > 0)
    return float(np.maximum(ratio_L, 1.0).mean())


def _pack(
    load_Re: NDArray[np.float64], expert_Rp: NDArray[np.int64], slots_G: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], int]:
    """Which device holds which expert `[R, G, e]`, all rows abreast, and the choices repaired."""
    num_rows = len(expert_Rp)
    row_R, replica_Rp = np.arange(num_rows), replica_loads(load_Re, expert_Rp)
    held_RGe = np.zeros((num_rows, len(slots_G), load_Re.shape[1]), dtype=np.bool_)
    # A device without room weighs infinitely much.
    weight_RG, free_RG = np.tile(np.where(slots_G > 0, 0.0, np.inf), (num_rows, 1)), np.tile(slots_G, (num_rows, 1))
    repaired = 0
    for place_R in _order(replica_Rp, slots_G):
        expert_R = expert_Rp[row_R, place_R]
        published_R = weight_RG.argmin(axis=1)  # (2)
        device_R = np.where(held_RGe[row_R, :, expert_R], np.inf, weight_RG).argmin(axis=1)
        changed_R = (device_R != published_R) | held_RGe[row_R, device_R, expert_R]
        if changed_R.any():
            repaired += int(changed_R.sum())
            stuck_R = ~np.isfinite(weight_RG[row_R, device_R]) | held_RGe[row_R, device_R, expert_R]
            for stuck in np.flatnonzero(stuck_R):
                device_R[stuck] = published_R[stuck]
                expert_R[stuck] = _substitute(load_Re[stuck], held_RGe[stuck], device_R[stuck])
        held_RGe[row_R, device_R, expert_R] = True
        free_RG[row_R, device_R] -= 1
        room_R = free_RG[row_R, device_R] > 0
        weight_RG[row_R, device_R] = np.where(room_R, weight_RG[row_R, device_R] + replica_Rp[row_R, place_R], np.inf)
    return held_RGe, repaired


def _order(replica_Rp: NDArray[np.float64], slots_G: NDArray[np.int64]) -> NDArray[np.int64]:
    """The replicas in the order of packing, `[p, R]`: heaviest first, as they stand where every device takes one."""
    if slots_G.max() == 1:
        return np.tile(np.arange(replica_Rp.shape[1])[:, None], (1, len(replica_Rp)))
    return np.argsort(-replica_Rp, axis=1, kind="stable").T


def _substitute(load_e: NDArray[np.float64], held_Ge: NDArray[np.bool_], device: int) -> int:
    """The expert with the highest load a replica that a device lacks."""
    return int(np.where(held_Ge[device], -1.0, load_e / np.maximum(held_Ge.sum(axis=0), 1)).argmax())
