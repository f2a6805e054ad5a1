"""Bounds on the busiest device of steps that are split exactly over replicas, and the experts that prove them.

Legend: B steps; L MoE layers; E experts; D devices.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from ...solvers.arrays import Ints
from ...solvers.balance import step_ratios
from ...solvers.placement import Placement, ReplicaRule


@dataclass(frozen=True, slots=True)
class SplitBound:
    """The busiest device of a layer over the mean of its devices, a mean over steps that route tokens."""

    layer: int
    #: What the exact split reaches: the most that some experts have per device that holds one of them, so that no split
    #: is below; 1, the mean, are all experts
    split: float
    even: float  #: Where the replicas of an expert share alike
    at_mean: float  #: Share of steps that all experts bound
    #: experts, devices, often: the other set that bounds most often, the devices that hold one of it, and the share of
    #: steps that it bounds
    experts: tuple[int, ...]
    devices: int
    often: float


def split_bounds(loads: Ints, placement: Placement) -> list[SplitBound]:
    """The bounds of every layer, for loads of experts in steps, `[B, L, E]`; of layers without load none."""
    from ...solvers.quota import least
    from ...solvers.step_split import layer_holders

    alive, bounds = int(np.count_nonzero(placement.slots)), list[SplitBound]()
    even_BL = step_ratios(loads.astype(np.float64), replace(placement, replica_rule=ReplicaRule.EVEN))
    for layer, holders in enumerate(layer_holders(placement, placement.num_devices)):
        held_ED, ratios, sets = placement.holds(layer), list[float](), Counter[tuple[int, ...]]()
        used_B = loads[:, layer].any(axis=1)
        for total_E in loads[used_B, layer]:
            most, proof_D, _ = least(total_E, holders)
            ratios.append(most * alive / int(total_E.sum()))
            sets[tuple(np.flatnonzero(~held_ED[:, ~proof_D].any(axis=1)).tolist())] += 1
        if not ratios:
            continue
        whole = sets.pop(tuple(range(placement.num_experts)), 0)
        experts, often = sets.most_common(1)[0] if sets else ((), 0)
        bounds.append(
            SplitBound(
                layer=layer,
                split=float(np.mean(ratios)),
                even=float(even_BL[used_B, layer].mean()),
                at_mean=whole / len(ratios),
                experts=experts,
                devices=int(held_ED[[*experts]].any(axis=0).sum()),
                often=often / len(ratios),
            )
        )
    return bounds
