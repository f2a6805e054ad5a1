"""Whether a warm-up compiles all that a solve then needs; run apart, since compiled functions stay compiled.

Usage: python -m tests.solvers.test_warmth exflow CLUSTER, netmoe METHOD CLUSTER, or eplb SHAPE.
"""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import eplb, exflow, netmoe
from moeplan.solvers.eplb.layers import compile_refinement
from moeplan.solvers.exflow.methods import compile_annealing
from moeplan.solvers.placement import ReplicaRule

ROOT = Path(__file__).parents[2]


def signatures() -> dict[str, list[object]]:
    """The types that each function of ours has been compiled for, or loaded."""
    modules = [module for name, module in sys.modules.items() if name.startswith("moeplan.")]
    found = [one for module in modules for one in vars(module).values() if hasattr(one, "nopython_signatures")]
    return {f"{one.__module__}.{one.__name__}": list(one.signatures) for one in found}


def main(strategy: str, *words: str) -> None:
    """Fail where the solve compiled anything that the warm-up had not."""
    rng = np.random.default_rng(0)
    if strategy == "netmoe":
        method, cluster = words[0], Cluster.parse(words[1])
        copies = rng.integers(0, 9, (5 * cluster.num_devices, cluster.num_devices))
        assert netmoe.compile_rehoming(method, cluster) > 0
        warm = signatures()
        for following, bounded in itertools.product((None, rng.random(copies.shape)), (True, False)):
            predicted: dict[str, Any] = {"next_copies": following, "copy_bytes": 8.0, "bounded": bounded}
            netmoe.rehome(method, copies, copies.sum(1), cluster, **predicted)
    elif strategy == "exflow":
        assert compile_annealing() > 0
        warm = signatures()
        counts, loads = rng.integers(1, 99, (3, 12, 12)), rng.random((4, 12)) + 1
        for coactivation in (None, rng.integers(1, 99, (4, 12, 12))):
            for cap in (None, 1.5):
                place = Cluster.parse(words[0])
                exflow.solve(counts, place, coactivation=coactivation, loads=loads, max_load=cap, work=1e8)
    else:
        shape, rule = tuple(map(int, words[0].split(","))), ReplicaRule(words[1])
        assert compile_refinement(shape, rule) > 0
        warm = signatures()
        eplb.solve(rng.random(shape) + 0.1, Cluster.parse("2x2"), slots=6, replica_rule=rule)
    assert any(warm.values())
    assert signatures() == warm


@pytest.mark.parametrize(
    "words",
    [
        "exflow 2x2",
        "exflow 1x4",
        "netmoe sum 2x2",
        "netmoe bottleneck 2x4",
        "eplb 1,16 even",
        "eplb 5,6,16 even",
        "eplb 1,16 lp",
        "eplb 5,6,16 lp",
    ],
)
def test_a_solve_compiles_nothing_more(words: str) -> None:
    command = [sys.executable, "-m", "tests.solvers.test_warmth", *words.split()]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)


if __name__ == "__main__":
    main(*sys.argv[1:])
