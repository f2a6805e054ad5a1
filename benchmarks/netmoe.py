"""NetMoE's homes of samples: seconds beside Kuhn-Munkres, copies saved beside blind dealing and the bounds.

Kuhn-Munkres is `scipy.optimize.linear_sum_assignment` on the matrix with duplicated columns, timed without making it;
ours is the whole call, checks and conversion included. The samples of the generator have preferences of their own,
Dirichlet(alpha / E); in the ablation they persist from layer to layer through one transition matrix for all.

Run: python benchmarks/netmoe.py [--pulp] [--seeds N] [--data DIR]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import netmoe
from moeplan.solvers.assignment import Method, balanced_assignment

Array = np.ndarray
DEFAULT_DATA = Path(os.environ.get("MOEPLAN_DATA") or Path(__file__).parents[2] / "shared" / "data")
SPEED = ((384, 2), (768, 4), (2048, 4), (1024, 64))
TABLE_4 = ((2, 3.69), (4, 7.13), (8, 13.50), (16, 27.31), (24, 41.65))  # samples a device, ms to hide behind
LENGTH, TOP_K, HIDDEN, ALPHA = 1024, 2, 768, 3.0
LINKS = ("intra=400:2", "inter=100:5")  # Table 2


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pulp", action="store_true", help="also CBC")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    options = parser.parse_args()
    _speed()
    _table_4(["km", "flow", "transport", *(["pulp"] if options.pulp else [])])  # type: ignore[list-item]
    _reductions(options.seeds)
    _ablation(options.seeds)
    _real(options.data)


def _speed() -> None:
    started = time.perf_counter()
    balanced_assignment([[0, 1, 2], [0, 2, 1]], 1)
    balanced_assignment([[0.5, 1.2, 2.0], [0.1, 2.2, 1.0]], 1)
    print(
        f"first calls, compiling or loading what is cached: {time.perf_counter() - started:.2f} s (not in the figures)"
    )
    print(f"{'items':>6} {'sinks':>6} {'costs':>10} {'km ms':>9} {'ours ms':>9} {'km/ours':>8} {'flow/ours':>9}")
    for num_items, num_sinks in SPEED:
        rng = np.random.default_rng(0)
        shape, capacity = (num_items, num_sinks), -(-num_items // num_sinks)
        uniform, popular = rng.integers(0, 10_000, shape), rng.integers(0, 5_000, num_sinks)
        kinds = {"uniform": uniform, "popular": uniform - popular, "float": uniform / 9_999}
        for kind, cost in kinds.items():
            doubled = np.repeat(cost.astype(float), capacity, axis=1)[:, :num_items]
            km_ms = _median_ms(lambda d=doubled: linear_sum_assignment(d), 3)  # type: ignore[misc]
            flow_ms = _median_ms(lambda c=cost, n=capacity: balanced_assignment(c, n, "flow"), 3)  # type: ignore[misc]
            ours_ms = _median_ms(lambda c=cost, n=capacity: balanced_assignment(c, n), 15)  # type: ignore[misc]
            print(
                f"{num_items:6} {num_sinks:6} {kind:>10} {km_ms:9.2f} {ours_ms:9.3f} {km_ms / ours_ms:8.0f}"
                f" {flow_ms / ours_ms:9.1f}",
                flush=True,
            )


def _table_4(methods: list[Method]) -> None:
    print("\nTable 4: both stages on 2x8 devices, ms" + "".join(f" {m:>10}" for m in methods) + "     to hide behind")
    for each, budget_ms in TABLE_4:
        cluster = Cluster(2, 8)
        counts = _counts(np.random.default_rng(0), cluster, each)
        units = netmoe.traffic_of(counts, _experts(cluster), cluster).units
        room = np.full(cluster.num_devices, each)
        times = [
            _median_ms(lambda m=m, u=units, r=room: netmoe.two_stages(u, r, 8, m), 1 if m == "pulp" else 5)  # type: ignore[misc]
            for m in methods
        ]
        print(f"{'I = ' + str(16 * each):>39}" + "".join(f" {ms:10.2f}" for ms in times) + f" {budget_ms:18.2f}")


def _reductions(seeds: int) -> None:
    print(f"\nuniform baseline (1 - 1/N) I L K H; samples Dirichlet({ALPHA:g}/E), mean over {seeds} steps")
    print(
        f"{'devices':>8} {'baseline MB':>12} {'saved':>7} {'at most':>8} {'gap sum':>8} {'busiest saved':>14}"
        f" {'+ refined':>10} {'gap time':>9} {'solve ms':>9} {'refine ms':>10}"
    )
    for nodes, group in ((2, 8), (4, 8)):
        cluster = Cluster.parse(f"{nodes}x{group}", LINKS)
        rows = [_reduction(np.random.default_rng(seed), cluster) for seed in range(seeds)]
        saved, most, gap, busiest, refined, time_gap, solve_s, refine_s = np.mean(rows, axis=0)
        baseline = (1 - 1 / nodes) * 4 * cluster.num_devices * LENGTH * TOP_K * HIDDEN
        print(
            f"{cluster!s:>8} {baseline / 1e6:12.1f} {saved:7.3f} {most:8.3f} {gap:8.4f} {busiest:14.3f}"
            f" {refined:10.3f} {time_gap:9.4f} {solve_s * 1e3:9.2f} {refine_s * 1e3:10.1f}"
        )


def _reduction(rng: np.random.Generator, cluster: Cluster) -> tuple[float, ...]:
    counts, experts = _counts(rng, cluster, 4), _experts(cluster)
    found = netmoe.solve(counts, experts, cluster)
    refined = netmoe.solve(counts, experts, cluster, objective="bottleneck", copy_bytes=HIDDEN * 2)
    baseline = (1 - 1 / cluster.num_nodes) * counts.sum()
    busiest = baseline / cluster.num_nodes
    traffic = netmoe.traffic_of(counts, experts, cluster)
    index = netmoe.locality(traffic, np.full(cluster.num_devices, 4), cluster)
    gaps = [result.outcome.gap or 0.0 for result in (found, refined)]
    return (
        1 - found.gather.inter / baseline,
        index.share,
        gaps[0],
        1 - found.gather.busiest_inter / busiest,
        1 - refined.gather.busiest_inter / busiest,
        gaps[1],
        found.outcome.wall_s,
        refined.outcome.wall_s,
    )


def _ablation(seeds: int) -> None:
    print(f"\ncopies between nodes saved over both exchanges, next layer as predicted, mean over {seeds} steps")
    print(f"{'devices':>8}" + "".join(f" {name:>8}" for name in ("none", "global", "sample", "oracle")))
    for nodes in (2, 4):
        cluster = Cluster(nodes, 8)
        rows = [_predicted(np.random.default_rng(seed), cluster) for seed in range(seeds)]
        print(f"{cluster!s:>8}" + "".join(f" {share:8.3f}" for share in np.mean(rows, axis=0)))


def _predicted(rng: np.random.Generator, cluster: Cluster) -> list[float]:
    counts, experts = _counts(rng, cluster, 4), _experts(cluster)
    transitions = rng.dirichlet(np.full(len(experts), 0.08), len(experts))
    actual = np.array([sum(map(rng.multinomial, num, transitions)) for num in counts])
    predictions = (
        None,
        netmoe.global_next(counts, transitions),
        netmoe.predict_next(counts, transitions),
        actual,
    )
    return [_saved(counts, actual, prediction, experts, cluster) for prediction in predictions]


def _saved(counts: Array, actual: Array, predicted: Array | None, experts: Array, cluster: Cluster) -> float:
    """The share of blind copies between nodes saved over both exchanges by homes that see a prediction."""
    home = netmoe.solve(counts, experts, cluster, next_counts=predicted).device_of_sample
    traffic = netmoe.traffic_of(counts, experts, cluster, next_counts=actual)
    copies = sum(netmoe.volumes(x, home, cluster).inter for x in traffic.exchanges)
    room = np.full(cluster.num_devices, -(-len(counts) // cluster.num_devices))
    return 1 - copies / netmoe.locality(traffic, room, cluster).blind


def _real(data: Path) -> None:
    sources: dict[str, Callable[[Path], Array]] = {"olmoe-1b-7b": _olmoe, "smartmoe-gpt-moe-training": _smartmoe}
    print(
        "\nreal counts, experts contiguous: copies between nodes saved, the locality index before it, mean, oracle next"
    )
    for name, read in sources.items():
        if not (data / name).exists():
            print(f"no {name} in {data}")
            continue
        steps = read(data / name)  # [B, L, I, E]
        for nodes in (2, 4):
            cluster = Cluster(nodes, 8 // nodes)
            experts = np.arange(steps.shape[3]) * cluster.num_devices // steps.shape[3]
            rows = [
                _real_row(layers[at], layers[at + 1], experts, cluster)
                for layers in steps
                for at in range(len(layers) - 1)
            ]
            saved, index = np.mean(rows, axis=0)
            print(f"{name:>26} {cluster}  saved {saved:6.3f}  at most {index:6.3f}  of {len(rows)} layer steps")


def _real_row(counts: Array, following: Array, experts: Array, cluster: Cluster) -> tuple[float, float]:
    traffic = netmoe.traffic_of(counts, experts, cluster, next_counts=following)
    room = np.full(cluster.num_devices, len(counts) // cluster.num_devices)
    return _saved(counts, following, following, experts, cluster), netmoe.locality(traffic, room, cluster).share


def _olmoe(folder: Path) -> Array:
    with np.load(folder / "per_sample_counts.npz") as data:
        counts = data["counts"].astype(np.int64)
    return np.asarray(counts.reshape(8, 64, *counts.shape[1:]).transpose(0, 2, 1, 3))


def _smartmoe(folder: Path) -> Array:
    with np.load(next(folder.glob("*.npz"))) as data:
        counts = data["counts"][::50].astype(np.int64)  # [B, ranks, L, micro-batches, E]
    return np.asarray(counts.transpose(0, 2, 1, 3, 4).reshape(len(counts), counts.shape[2], -1, counts.shape[4]))


def _counts(rng: np.random.Generator, cluster: Cluster, samples_each: int) -> Array:
    """Samples with preferences of their own, `[I, E]`, two experts a device."""
    num_experts = 2 * cluster.num_devices
    taste = rng.dirichlet(np.full(num_experts, ALPHA / num_experts), samples_each * cluster.num_devices)
    return rng.multinomial(LENGTH * TOP_K, taste)


def _experts(cluster: Cluster) -> Array:
    return np.arange(2 * cluster.num_devices) // 2


def _median_ms(call: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e3


if __name__ == "__main__":
    main()
