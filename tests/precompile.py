"""Tiny solves that compile what the tests' solves need, once, before workers would each compile it for themselves.

`precompile.py` runs all groups of them at once, a process each; `precompile.py GROUP` is one of these.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import moeplan
from moeplan.profilers.cluster import Cluster, Link

__all__ = ["compiled_code"]

NODES = Cluster(2, 2, {"intra": Link(1e-6, 1e-11), "inter": Link(1e-5, 1e-10)})


def compiled_code() -> str:
    """A folder for what numba compiles, one a state of the solvers: numba notices no change of a file called from."""
    solvers = sorted((Path(moeplan.__file__).parent / "solvers").rglob("*.py"))
    key = hashlib.sha256(b"".join(file.read_bytes() for file in solvers)).hexdigest()[:16]
    return str(Path(tempfile.gettempdir()) / f"moeplan-compiled-{os.getuid()}-{key}")


def exflow() -> None:
    from moeplan.solvers import exflow
    from moeplan.solvers.bounds import thorough_bound

    weights = np.random.default_rng(0).random((3, 8, 8))
    coactivation = np.ones((4, 8, 8))
    for cluster in (Cluster(1, 2), NODES):
        for slots in (None, 8 // cluster.num_devices + 1):
            exflow.solve(weights, cluster, slots=slots, time_limit_s=0.3)
        exflow.solve(weights, cluster, coactivation=coactivation, time_limit_s=0.3)
    thorough_bound(weights, np.full(2, 4), kept=0.9 * weights.sum(), time_limit_s=0.1)


def balance() -> None:
    from moeplan.solvers import eplb, netmoe

    rng = np.random.default_rng(0)
    for loads in (rng.integers(1, 99, (2, 8)), rng.integers(1, 99, (3, 2, 8))):
        for slots in (None, 3):
            eplb.solve(loads, NODES, slots=slots)
    for objective in ("sum", "bottleneck"):
        netmoe.solve(rng.integers(0, 5, (8, 8)), np.arange(8) // 2, NODES, objective=objective)


GROUPS: dict[str, Callable[[], None]] = {"exflow": exflow, "balance": balance}


def main(group: str | None = None) -> None:
    """Run a group, or all of them; what fails here shows in the tests."""
    if group is not None:
        GROUPS[group]()
        return
    env = {"NUMBA_CACHE_DIR": compiled_code(), **os.environ, "OMP_NUM_THREADS": "1"}
    for process in [subprocess.Popen([sys.executable, __file__, name], env=env) for name in GROUPS]:
        process.wait()


if __name__ == "__main__":
    del sys.path[0]  # where folders are named as those of the product
    main(*sys.argv[1:])
