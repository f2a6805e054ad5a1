"""The contiguous placement: experts in their own order, what engines do without a plan."""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..profilers.cluster import Cluster
from .balance import balance
from .outcome import Objective, Outcome, PlacementResult
from .placement import Placement, ReplicaRule, slots_for


def solve(
    num_layers: int,
    num_experts: int,
    cluster: Cluster,
    *,
    slots: int | Sequence[int] | NDArray[np.integer] | None = None,
) -> PlacementResult:
    """The placement whose slot i holds expert i mod E in every layer, sorted inside each device.

    A device's consecutive slots, at most E of them, hold different experts. The objective is the balance that equal
    loads would have; nothing is optimised and nothing bounded.

    Raises
    ------
    UsageError
        No layers or experts, or slots that cannot hold the experts.
    """
    started = time.perf_counter()
    if num_layers < 1 or num_experts < 1:
        raise UsageError(f"{num_layers} layers of {num_experts} experts; expected at least one of each")
    slots_D = slots_for(num_experts, cluster.num_devices, slots)
    device_P = np.repeat(np.arange(len(slots_D)), slots_D)
    expert_P = np.arange(len(device_P)) % num_experts
    row_P = expert_P[np.lexsort((expert_P, device_P))].astype(np.int32)
    placement = Placement(np.tile(row_P, (num_layers, 1)), slots_D, num_experts, ReplicaRule.EVEN)
    outcome = Outcome.of(
        objective=Objective("balance", balance(np.ones((num_layers, num_experts)), placement), "min"), started=started
    )
    return PlacementResult(placement, outcome)
