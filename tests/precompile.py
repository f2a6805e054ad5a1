"""Tiny solves that compile what the tests' solves need, once, before workers would each compile it for themselves.

`precompile.py` runs all groups of them at once, a process each; `precompile.py GROUP` is one of these.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import numpy as np

from moeplan.profilers.cluster import Link
from moeplan.solvers import eplb, flexmoe, precompile
from moeplan.solvers.bounds import thorough_bound
from moeplan.solvers.compiled import source_hash
from moeplan.solvers.placement import ReplicaRule

__all__ = ["compiled_code"]


def compiled_code() -> str:
    """A folder for what numba compiles, one a state of the solvers: several checkouts do not take turns in it."""
    return str(Path(tempfile.gettempdir()) / f"moeplan-compiled-{os.getuid()}-{source_hash()[:16]}")


def bounds() -> None:
    weights = np.random.default_rng(0).random((3, 8, 8))
    thorough_bound(weights, np.full(2, 4), kept=0.9 * weights.sum(), time_limit_s=0.1)


def splits() -> None:
    """Compile what balances steps whose pairs are split over replicas."""
    rng = np.random.default_rng(0)
    for loads in (rng.integers(1, 99, (2, 8)), rng.integers(1, 99, (3, 2, 8))):
        eplb.solve(loads, precompile.NODES, slots=3, replica_rule=ReplicaRule.LP)


def followed() -> None:
    costs = flexmoe.Costs.of(parameters=10**6, hidden=64, pair_s=1e-7, intra=Link(1e-6, 1e-11), inter=Link(1e-5, 1e-10))
    records = np.random.default_rng(0).integers(0, 99, (6, 1, 2, 6, 4))
    start = flexmoe.initial(records[:4], 2, costs, group=2)
    for rule in (flexmoe.Policy(trigger=1.0, evaluations=9), flexmoe.Paper(threshold=1.0)):
        flexmoe.follow(records, start, rule, costs, group=2)
    for split in get_args(flexmoe.Split):
        flexmoe.follow(records, start, flexmoe.Stay(), costs, group=2, split=split)


GROUPS = {**precompile.GROUPS, "bounds": bounds, "splits": splits, "flexmoe": followed}


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
