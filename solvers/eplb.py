"""EPLB: replicas for the busiest experts, packed evenly (DeepSeek's published algorithm, global form).

Legend: L MoE layers; E experts a layer; P slots a layer; D devices.
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
    loads: ArrayLike, cluster: Cluster, *, slots: int | Sequence[int] | NDArray[np.integer] | None = None
) -> PlacementResult:
    """The placement of the global EPLB, repaired where it would put an expert twice on a device.

    Parameters
    ----------
    loads
        `[L, E]`, at least 0.
    slots
        S, one number for all devices or one a device; by default ceil(E / D).

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
    (1) Every surplus slot in turn becomes a replica of the expert with the highest load a replica. (2) Replicas,
    heaviest first, go to the least loaded device with room. Repairs: in (1) an expert that every device could hold
    gets no more; in (2) devices that hold the expert are passed over, and where none is left, the slot is filled
    with another expert's replica. Bound: (1) minimises the largest replica load, so no placement has
    max/mean below max(1, largest replica load / mean).
    """
    started = time.perf_counter()
    loads_LE = checked_counts(loads, "loads", (None, None))
    slots_D = slots_for(loads_LE.shape[1], cluster.num_devices, slots)
    expert_LP, repaired = _replicate(loads_LE, int(slots_D.sum()), int((slots_D > 0).sum()))
    bound = _bound(loads_LE, expert_LP, int((slots_D > 0).sum()))
    held_LDE, moved = _pack(loads_LE, expert_LP, slots_D)
    _, _, expert_N = np.nonzero(held_LDE)  # layer by layer, device by device, experts ascending
    placement = Placement(
        expert_N.reshape(expert_LP.shape).astype(np.int32), slots_D, loads_LE.shape[1], ReplicaRule.EVEN
    )
    value = balance(loads_LE, placement)
    outcome = Outcome.of(
        status=Status.FEASIBLE,
        objective=Objective("balance", value, "min"),
        bound=bound,
        bound_kind="mean and largest replica",
        proven=value <= bound * (1 + ROUNDING),
        started=started,
        backend="moeplan",
    )
    return PlacementResult(placement, outcome, repaired + moved)


def _replicate(loads_LE: NDArray[np.float64], num_slots: int, most: int) -> tuple[NDArray[np.int64], int]:
    """The expert of every replica `[L, P]`, no expert more than `most` times, and how often that was in the way."""
    num_layers, num_experts = loads_LE.shape
    layer = np.arange(num_layers)
    expert_LP = np.tile(np.arange(num_slots) % num_experts, (num_layers, 1))
    count_LE, repaired = np.ones(loads_LE.shape), 0
    for slot in range(num_experts, num_slots):
        a_replica_LE = loads_LE / count_LE
        repaired += int((count_LE[layer, a_replica_LE.argmax(axis=1)] >= most).sum())
        chosen_L = np.where(count_LE < most, a_replica_LE, -1.0).argmax(axis=1)  # (1)
        expert_LP[:, slot] = chosen_L
        count_LE[layer, chosen_L] += 1
    return expert_LP, repaired


def _bound(loads_LE: NDArray[np.float64], expert_LP: NDArray[np.int64], num_devices: int) -> float:
    mean_L = loads_LE.sum(axis=1) / num_devices
    largest_L = replica_loads(loads_LE, expert_LP).max(axis=1)
    ratio_L = np.divide(largest_L, mean_L, out=np.ones_like(mean_L), where=mean_L > 0)
    return float(np.maximum(ratio_L, 1.0).mean())


def _pack(
    loads_LE: NDArray[np.float64], expert_LP: NDArray[np.int64], slots_D: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], int]:
    """Which device holds which expert `[L, D, E]`, all layers abreast, and the choices repaired."""
    num_layers = len(expert_LP)
    layer, replica_LP = np.arange(num_layers), replica_loads(loads_LE, expert_LP)
    held_LDE = np.zeros((num_layers, len(slots_D), loads_LE.shape[1]), dtype=np.bool_)
    load_LD, free_LD, repaired = np.zeros((num_layers, len(slots_D))), np.tile(slots_D, (num_layers, 1)), 0
    for place_L in np.argsort(-replica_LP, axis=1, kind="stable").T:
        expert_L, weight_L = expert_LP[layer, place_L], replica_LP[layer, place_L]
        open_LD = np.where(free_LD > 0, load_LD, np.inf)
        lacking_LD = np.where(held_LDE[layer, :, expert_L], np.inf, open_LD)
        device_L, published_L = lacking_LD.argmin(axis=1), open_LD.argmin(axis=1)  # (2)
        stuck_L = np.isinf(lacking_LD[layer, device_L])
        repaired += int((stuck_L | (published_L != device_L)).sum())
        for stuck in np.flatnonzero(stuck_L):
            device_L[stuck] = published_L[stuck]
            expert_L[stuck] = _substitute(loads_LE[stuck], held_LDE[stuck], device_L[stuck])
        held_LDE[layer, device_L, expert_L] = True
        load_LD[layer, device_L] += weight_L
        free_LD[layer, device_L] -= 1
    return held_LDE, repaired


def _substitute(load_E: NDArray[np.float64], held_DE: NDArray[np.bool_], device: int) -> int:
    """The expert with the highest load a replica that a device lacks."""
    return int(np.where(held_DE[device], -1.0, load_E / np.maximum(held_DE.sum(axis=0), 1)).argmax())
