"""Seconds of each method of `balanced_assignment`, as ratios to Kuhn-Munkres on duplicated columns in the same run.

Run: python benchmarks/assignment.py [--pulp]
"""

import argparse
import statistics
import time

import numpy as np

from moeplan.solvers.assignment import Method, balanced_assignment

SIZES = ((32, 4), (32, 32), (256, 8), (256, 64), (384, 2), (768, 4), (2048, 4), (256, 320))


def main() -> None:
    """Print one row a size: seconds of km, then how many times km's time the others take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pulp", action="store_true", help="also CBC (seconds a solve)")
    methods: list[Method] = ["km", "flow", "transport", *(["pulp"] if parser.parse_args().pulp else [])]  # type: ignore[list-item]
    print(f"{'items':>6} {'sinks':>6} {'costs':>6} {'km ms':>9}" + "".join(f" {m + '/km':>12}" for m in methods[1:]))
    for num_items, num_sinks in SIZES:
        for kind in ("int", "float"):
            rng = np.random.default_rng(0)
            shape = (num_items, num_sinks)
            cost = rng.integers(0, 10_000, shape) if kind == "int" else rng.normal(size=shape)
            seconds = {method: _median_s(cost, -(-num_items // num_sinks), method) for method in methods}
            row = "".join(f" {seconds[method] / seconds['km']:12.4f}" for method in methods[1:])
            print(f"{num_items:6} {num_sinks:6} {kind:>6} {seconds['km'] * 1e3:9.3f}{row}", flush=True)


def _median_s(cost: np.ndarray, capacity: int, method: Method) -> float:
    balanced_assignment(cost, capacity, method)
    times = []
    for _ in range(1 if method == "pulp" else 5):
        started = time.perf_counter()
        balanced_assignment(cost, capacity, method)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()
