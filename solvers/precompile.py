"""Tiny solves that compile the solvers' inner loops, so that several processes may do it at once, and once for all.

`python -m moeplan.solvers.precompile GROUP` runs one group of them.
"""

import sys
from collections.abc import Callable

import numpy as np

from ..profilers.cluster import Cluster, Link

NODES = Cluster(2, 2, {"intra": Link(1e-6, 1e-11), "inter": Link(1e-5, 1e-10)})


def exflow() -> None:
    """Compile the search for placements of both objectives, with and without replicas."""
    from . import exflow as solver

    weights = np.random.default_rng(0).random((3, 8, 8))
    for cluster in (Cluster(1, 2), NODES):
        for slots in (None, 8 // cluster.num_devices + 1):
            solver.solve(weights, cluster, slots=slots, time_limit_s=0.05)
        solver.solve(weights, cluster, coactivation=np.ones((4, 8, 8)), time_limit_s=0.05)


def balance() -> None:
    """Compile what balances loads, and what re-homes samples."""
    from . import eplb, netmoe

    rng = np.random.default_rng(0)
    for loads in (rng.integers(1, 99, (2, 8)), rng.integers(1, 99, (3, 2, 8))):
        for slots in (None, 3):
            eplb.solve(loads, NODES, slots=slots)
    for objective in ("sum", "bottleneck"):
        netmoe.solve(rng.integers(0, 5, (8, 8)), np.arange(8) // 2, NODES, objective=objective)


GROUPS: dict[str, Callable[[], None]] = {"exflow": exflow, "balance": balance}

if __name__ == "__main__":
    GROUPS[sys.argv[1]]()
