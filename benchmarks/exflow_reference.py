"""The best known placements of random instances, kept with the budget that found them.

Instances are balanced Markov transitions with Dirichlet rows, ten seeds a class, alpha spread evenly from 0.03 to 0.3
on a logarithmic scale. A run solves each instance with each of several search seeds and keeps the best share ever
found in the file beside this one; runs add up, and an interrupted one goes on where it stopped.

Run: python benchmarks/exflow_reference.py [--seconds S] [--searches N] [--classes LxExD,...] [--check]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow

FILE = Path(__file__).with_suffix(".json")
CLASSES = ("4x8x4", "12x8x4", "8x16x4", "24x32x8", "24x64x16")
SEEDS = 10


def main() -> None:
    """Improve the file, or compare one search an instance with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--searches", type=int, default=4)
    parser.add_argument("--classes", default=",".join(CLASSES))
    parser.add_argument("--check", action="store_true", help="print shares of the best known instead")
    options = parser.parse_args()
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in options.classes.split(","):
        ratios = []
        for seed in range(SEEDS):
            key = f"{name}/{seed}"
            weights = instance(name, seed)
            if options.check:
                ratios.append(_share(weights, name, options.seconds, 0)["share"] / known[key]["share"])
            else:
                known[key] = _improved(known.get(key), weights, name, options.seconds, options.searches)
                FILE.write_text(json.dumps(known, indent=1) + "\n")
                print(key, known[key], flush=True)
        if ratios:
            print(
                f"{name:>10} in {options.seconds:g} s: mean {np.mean(ratios):.4f} least {min(ratios):.4f}", flush=True
            )


def instance(name: str, seed: int) -> NDArray[np.float64]:
    """The transitions of one instance, `[L-1, E, E]`, every row and column sum 1."""
    num_layers, num_experts, _ = map(int, name.split("x"))
    alpha = 0.03 * 10 ** (seed / (SEEDS - 1))
    weights = np.random.default_rng(seed).dirichlet(np.full(num_experts, alpha), (num_layers - 1, num_experts))
    for _ in range(200):
        weights /= weights.sum(axis=1, keepdims=True)
        weights /= weights.sum(axis=2, keepdims=True)
    return weights


def _improved(
    known: dict[str, Any] | None, weights: NDArray[np.float64], name: str, seconds: float, searches: int
) -> dict[str, Any]:
    """The better of what is known and what new searches find; searches done before are not repeated."""
    best = known or {"share": 0.0, "runs": []}
    for seed in range(searches):
        run = {"seconds": seconds, "seed": seed}
        if run in best["runs"]:
            continue
        found = _share(weights, name, seconds, seed)
        runs = [*best["runs"], run]
        best = {**(found if found["share"] > best["share"] else best), "runs": runs}
    return best


def _share(weights: NDArray[np.float64], name: str, seconds: float, seed: int) -> dict[str, Any]:
    found = exflow.solve(weights, Cluster(1, int(name.split("x")[2])), time_limit_s=seconds, seed=seed).outcome
    return {
        "share": found.objective.value,
        "bound": found.bound,
        "proven": found.status == "optimal",
        "found_by": {"seconds": seconds, "seed": seed, "wall_s": round(found.wall_s, 2)},
    }


if __name__ == "__main__":
    main()
