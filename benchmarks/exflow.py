"""ExFlow placements: held-out quality on real routing, and how quality and seconds grow with L, E and D.

Every figure stands beside the chain of assignments alone (one start, no sweeps), solved in the same run.

Run: python benchmarks/exflow.py [--seeds N] [--data DIR]
"""

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
from moeplan.solvers.bounds import kept_bound
from moeplan.solvers.cost import hops_kept
from moeplan.solvers.exflow.budget import Budget
from moeplan.solvers.exflow.chain import chain
from moeplan.solvers.exflow.programme import Programme
from moeplan.traces.split import fitted

Array = np.ndarray
DEFAULT_DATA = Path(os.environ.get("MOEPLAN_DATA") or Path(__file__).parents[2] / "shared" / "data")
GROWTH = ((6, 32, 8), (12, 32, 8), (24, 32, 8), (12, 64, 8), (12, 128, 8), (12, 64, 16), (12, 64, 32), (12, 64, 64))


def main() -> None:
    """Print the two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    options = parser.parse_args()
    routing = options.data / "gpt-oss-20b" / "routing.npz"
    if routing.exists():
        _real(routing, options.seeds)
    else:
        print(f"no real routing at {routing}")
    _growth()


def _real(routing: Path, seeds: int) -> None:
    print("gpt-oss-20b, share of top-1 hops kept on held-out samples, mean over hash splits")
    print(f"{'devices':>7} {'sweeps':>8} {'chain':>8} {'fit':>8} {'bound':>8} {'longest s':>10} {'x chain s':>10}")
    splits = list(_splits(routing, seeds))
    for num_devices in (4, 8, 16, 32):
        rows = [_row(fit, unseen, num_devices, seed) for seed, (fit, unseen) in enumerate(splits)]
        share, chain_share, fit_share, bound, seconds, chain_s = np.array(rows).T
        print(
            f"{num_devices:7} {share.mean():8.4f} {chain_share.mean():8.4f} {fit_share.mean():8.4f} {bound.mean():8.4f}"
            f" {seconds.max():10.2f} {np.median(seconds / chain_s):10.0f}",
            flush=True,
        )


def _growth() -> None:
    print("\nbalanced Markov transitions, rows Dirichlet(0.08), share of hops kept")
    print(f"{'L':>4} {'E':>4} {'D':>4} {'sweeps':>8} {'chain':>8} {'bound':>8} {'seconds':>8} {'x chain s':>10}")
    for num_layers, num_experts, num_devices in GROWTH:
        weights = _markov(np.random.default_rng(0), num_layers, num_experts)
        share, chain_share, _, bound, seconds, chain_s = _row(weights, weights, num_devices, 0)
        print(
            f"{num_layers:4} {num_experts:4} {num_devices:4} {share:8.4f} {chain_share:8.4f} {bound:8.4f}"
            f" {seconds:8.2f} {seconds / chain_s:10.0f}",
            flush=True,
        )


def _row(fit: Array, unseen: Array, num_devices: int, seed: int) -> tuple[float, ...]:
    """Share kept of `unseen` by sweeps and chain, of `fit` by sweeps, its bound, seconds of sweeps and chain."""
    found = exflow.solve(fit, Cluster(1, num_devices), seed=seed)
    share = float(hops_kept(unseen, found.placement, num_devices).device.sum() / unseen.sum())
    num_layers, num_experts = len(fit) + 1, fit.shape[1]
    slots = np.full(num_devices, num_experts // num_devices)
    programme = Programme(list(fit), (num_experts,) * num_layers, slots, np.eye(num_devices), num_devices)
    started = time.perf_counter()
    layout = chain(programme, 0, Budget(0, 60), np.random.default_rng(seed))
    chain_s = time.perf_counter() - started
    same = np.array([here[:, None] == there for here, there in itertools.pairwise(layout)])
    chain_share = float(unseen[same].sum() / unseen.sum())
    bound = kept_bound(fit, slots).value / fit.sum()
    return share, chain_share, found.outcome.objective.value, float(bound), found.outcome.wall_s, chain_s


def _splits(routing: Path, seeds: int) -> Iterator[tuple[Array, Array]]:
    with np.load(routing) as data:
        ids, sample = data["expert_ids"][:, :, 0].astype(np.int64), data["seq_id"].astype(np.int64)
        num_experts = int(data["num_experts"])
    samples, of_sample = np.unique(sample, return_inverse=True)
    for seed in range(seeds):
        fit = fitted(samples, seed=seed, fraction=0.5)[of_sample]
        yield _transitions(ids[fit], num_experts), _transitions(ids[~fit], num_experts)


def _transitions(ids: Array, num_experts: int) -> Array:
    pairs = (ids[:, :-1] * num_experts + ids[:, 1:]).T
    counts = [np.bincount(pair, minlength=num_experts**2) for pair in pairs]
    return np.array(counts, dtype=float).reshape(-1, num_experts, num_experts)


def _markov(rng: np.random.Generator, num_layers: int, num_experts: int) -> Array:
    weights = rng.dirichlet(np.full(num_experts, 0.08), (num_layers - 1, num_experts))
    for _ in range(50):
        weights /= weights.sum(axis=1, keepdims=True)
        weights /= weights.sum(axis=2, keepdims=True)
    return weights


if __name__ == "__main__":
    main()
