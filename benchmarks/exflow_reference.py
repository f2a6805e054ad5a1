"""The best known placements of random instances, kept with the budgets that found them.

Instances are balanced Markov transitions with Dirichlet rows, ten seeds a class, alpha spread evenly from 0.03 to 0.3
on a logarithmic scale. A run solves each instance with one more search seed and keeps the best share ever found in the
file beside this one; runs add up, and an interrupted one goes on where it stopped. Where a layer has few placements
(`MOST_LAYOUTS`), the best is found by dynamic programming over all of them instead, and is the optimum.

Run: python benchmarks/exflow_reference.py [--seconds S] [--searches N] [--classes LxExD,...]

Legend: L MoE layers; E experts per layer; D devices of S slots; X placements of one layer.
"""

import argparse
import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeplan.files import write_json
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
from moeplan.solvers.exflow.strategy import ANNEALING_RATE
from moeplan.solvers.outcome import Status

FILE = Path(__file__).with_suffix(".json")
CLASSES = ("4x8x4", "12x8x4", "8x16x4", "24x32x8", "24x64x16")
SEEDS = 10
MOST_LAYOUTS = 3_000
NO_LIMIT_S = 1e5  # work ends a search, so that it does not depend on what else the machine does


def main() -> None:
    """Improve the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of a quiet machine: work is what ends a search")
    parser.add_argument("--searches", type=int, default=4)
    parser.add_argument("--classes", default=",".join(CLASSES))
    options = parser.parse_args()
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in options.classes.split(","):
        for seed in range(SEEDS):
            known[f"{name}/{seed}"] = _improved(known.get(f"{name}/{seed}"), name, seed, options)
            write_json(FILE, known)
            print(f"{name}/{seed}", known[f"{name}/{seed}"]["share"], flush=True)


def instance(name: str, seed: int) -> NDArray[np.float64]:
    """The transitions of one instance, `[L-1, E, E]`, every row and column sum 1."""
    num_layers, num_experts, _ = map(int, name.split("x"))
    alpha = 0.03 * 10 ** (seed / (SEEDS - 1))
    weights = np.random.default_rng(seed).dirichlet(np.full(num_experts, alpha), (num_layers - 1, num_experts))
    for _ in range(200):
        weights /= weights.sum(axis=1, keepdims=True)
        weights /= weights.sum(axis=2, keepdims=True)
    return weights


def optimum(weights: NDArray[np.float64], num_devices: int) -> float:
    """The largest share that stays on its device, over all placements."""
    num_experts = weights.shape[1]
    slots = num_experts // num_devices
    groups = list(combinations(range(num_experts), slots))
    layouts_XD = np.array(_layouts(groups, frozenset(range(num_experts))))
    inside = np.array([np.isin(np.arange(num_experts), group) for group in groups], dtype=np.float64)
    best_X = np.zeros(len(layouts_XD))
    for weight_EE in weights:
        kept = inside @ weight_EE @ inside.T
        found = sum(kept[here_X[:, None], here_X[None, :]] for here_X in layouts_XD.T)
        best_X = (best_X[:, None] + found).max(axis=0)
    return float(best_X.max() / weights.sum())


def _layouts(groups: list[tuple[int, ...]], free: frozenset[int]) -> list[list[int]]:
    """The groups of all devices, by their ordinals, for every way to deal the free experts."""
    if not free:
        return [[]]
    return [
        [ordinal, *rest]
        for ordinal, group in enumerate(groups)
        if free.issuperset(group)
        for rest in _layouts(groups, free - set(group))
    ]


def _improved(known: dict[str, Any] | None, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The better of what is known and what new searches find; searches done before are not repeated."""
    weights, best = instance(name, seed), known or {"share": 0.0, "runs": []}
    _, num_experts, num_devices = map(int, name.split("x"))
    slots = num_experts // num_devices
    if math.factorial(num_experts) / math.factorial(slots) ** num_devices <= MOST_LAYOUTS:
        return {"share": optimum(weights, num_devices), "optimal": True, "runs": best["runs"]}
    for number in range(options.searches):
        run = {"seconds": options.seconds, "seed": number}
        if run not in best["runs"]:
            share = _share(weights, num_devices, options.seconds, number)
            better = {"share": share, "found_by": run} if share > best["share"] else {}
            best = {**best, **better, "optimal": False, "runs": [*best["runs"], run]}
    return best


def _share(weights: NDArray[np.float64], num_devices: int, seconds: float, seed: int) -> float:
    work = seconds * ANNEALING_RATE
    found = exflow.solve(weights, Cluster(1, num_devices), time_limit_s=NO_LIMIT_S, work=work, seed=seed)
    if found.outcome.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    return found.outcome.objective.value


if __name__ == "__main__":
    main()
