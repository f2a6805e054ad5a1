"""NetMoE's homes of samples: seconds beside Kuhn-Munkres, copies saved beside blind dealing and the bounds.

Synthetic samples are `generator`'s; in the ablation their preferences persist from layer to layer.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import netmoe
from moeplan.solvers.assignment import Method
from moeplan.solvers.netmoe.bottleneck import Channels

from ..race import Call, race
from ..routing import OLMOE, SMARTMOE, carried_on, expert_devices, olmoe, sample_counts, smartmoe
from ..study import COPIES_SAVED, Row, Settings, Study

Array = np.ndarray
METHODS: tuple[Method, ...] = ("km", "flow", "transport", "pulp")
TABLE_4 = ((2, 3.69e-3), (4, 7.13e-3), (8, 13.50e-3), (16, 27.31e-3), (24, 41.65e-3))  # samples a device, s to hide in
HIDDEN, COPY_BYTES = 768, 1536
LINKS = ("intra=400:2", "inter=100:5")  # Table 2
SEEDS = 20


def _table_4(instance: tuple[int, float]) -> Iterator[Row]:
    each, budget_s = instance
    cluster, counts = Cluster(2, 8), sample_counts(np.random.default_rng(0), Cluster(2, 8), each)
    traffic, room = netmoe.traffic_of(counts, expert_devices(cluster), cluster), np.full(16, each)
    units, index = traffic.units, netmoe.locality(traffic, np.full(16, each), cluster)
    calls: dict[str, Call] = {m: lambda m=m: netmoe.two_stages(units, room, 8, m) for m in METHODS}  # type: ignore[misc]
    for method, timing in race(calls, "km").items():
        saved = 1 - netmoe.volumes(traffic.gather, timing.value, cluster).inter / index.blind
        more = {"budget, s": budget_s}
        kind = {"axis": "samples I, both stages on 2x8", "size": 16 * each, **timing.figures}
        yield Row(f"I={16 * each} on 2x8", method, quality=saved, bound=index.share, more=more, **kind)


def _table_5(instance: tuple[Cluster, int]) -> Iterator[Row]:
    """The mean over seeds; seconds and memory of the first."""
    cluster, seeds = instance
    experts = expert_devices(cluster)
    steps = [sample_counts(np.random.default_rng(seed), cluster, 4) for seed in range(seeds)]
    blind = (1 - 1 / cluster.num_nodes) * float(steps[0].sum())
    bytes_each = HIDDEN / 1e6  # K H bytes a token as the paper's s_inter counts, thus H a copy
    room = np.full(cluster.num_devices, 4)
    bounds = [netmoe.locality(netmoe.traffic_of(counts, experts, cluster), room, cluster).least for counts in steps]
    name = f"{cluster} I={len(steps[0])}"
    yield Row(name, "uniform", quality=0.0, more={"volume, MB": blind * bytes_each})
    calls: dict[str, Call] = {
        "paper (km)": lambda: netmoe.solve(steps[0], experts, cluster, method="km"),
        "sum": lambda: netmoe.solve(steps[0], experts, cluster),
    }
    for method, timing in race(calls, "paper (km)").items():
        how: Method = "km" if method == "paper (km)" else "transport"
        found = [netmoe.solve(counts, experts, cluster, method=how).gather for counts in steps]
        far, busiest = fmean(x.inter for x in found), fmean(x.busiest_inter for x in found)
        more = {
            "volume, MB": far * bytes_each,
            "busiest node, %": 1 - busiest * cluster.num_nodes / blind,
            "spread, %": pstdev(1 - x.inter / blind for x in found),
        }
        yield Row(name, method, quality=1 - far / blind, bound=1 - fmean(bounds) / blind, more=more, **timing.figures)


def _busiest(instance: tuple[str, Cluster, Array]) -> Iterator[Row]:
    """Mean over steps `[B, I, E]` of the seconds that the busiest ports take."""
    name, cluster, steps = instance
    experts = np.arange(steps.shape[2]) * cluster.num_devices // steps.shape[2]
    channels = Channels.of(cluster, COPY_BYTES)
    traffic = [netmoe.traffic_of(counts, experts, cluster) for counts in steps]
    in_order = np.arange(steps.shape[1]) * cluster.num_devices // steps.shape[1]

    def solved(objective: str, at: slice) -> list[netmoe.NetMoeResult]:
        wanted = {"sum": {}, "bottleneck": {"objective": "bottleneck", "copy_bytes": COPY_BYTES}}[objective]
        return [netmoe.solve(counts, experts, cluster, **wanted) for counts in steps[at]]  # type: ignore[arg-type]

    stay_s = fmean(channels.total(x, in_order) for x in traffic)
    yield Row(name, "stay", quality=stay_s)
    timings = race({o: lambda o=o: solved(o, slice(1)) for o in ("sum", "bottleneck")}, "sum", rounds=3)  # type: ignore[misc]
    found = {objective: solved(objective, slice(None)) for objective in timings}
    bound = fmean(one.outcome.bound or 0.0 for one in found["bottleneck"])
    homes = {objective: [one.device_of_sample for one in solves] for objective, solves in found.items()}
    sum_s = 0.0
    for objective, timing in timings.items():
        total_s = fmean(channels.total(*one) for one in zip(traffic, homes[objective], strict=True))
        sum_s = sum_s or total_s
        more = {"gain over stay, %": 1 - total_s / stay_s}
        if objective != "sum":
            more["over sum, %"] = 1 - total_s / sum_s
        yield Row(name, objective, quality=total_s, bound=bound, more=more, **timing.figures)


def _synthetic_steps(settings: Settings) -> list[tuple[str, Cluster, Array]]:
    seeds, found = 3 if settings.quick else SEEDS, []
    for nodes in (2, 4):
        cluster = Cluster.parse(f"{nodes}x8", LINKS)
        steps = np.array([sample_counts(np.random.default_rng(seed), cluster, 4) for seed in range(seeds)])
        found.append((f"{nodes}x8 generator", cluster, steps))
    return found


def _real_steps(settings: Settings) -> list[tuple[str, Cluster, Array]]:
    layers, found = (0,) if settings.quick else (0, 5, 11), []
    steps = olmoe(settings.data)[:, layers]
    for nodes in (2, 4):
        cluster = Cluster.parse(f"{nodes}x{8 // nodes}", LINKS)
        found.append((f"{cluster} olmoe", cluster, steps.reshape(-1, *steps.shape[2:])))
    return found


def _ablation(instance: tuple[Cluster, int]) -> Iterator[Row]:
    """Over the seeds, each as `_saved`."""
    cluster, seeds = instance
    rows = [_predicted(np.random.default_rng(seed), cluster) for seed in range(seeds)]
    *shares, bound = np.mean([list(row.values()) for row in rows], axis=0).tolist()
    for method, share in zip(rows[0], shares, strict=False):
        yield Row(f"{cluster} I={4 * cluster.num_devices}", method, quality=share, bound=bound)


def _predicted(rng: np.random.Generator, cluster: Cluster) -> dict[str, float]:
    counts, experts = sample_counts(rng, cluster, 4), expert_devices(cluster)
    transitions, actual = carried_on(rng, counts)
    predictions: Mapping[str, Array | None] = {
        "none": None,
        "global": netmoe.global_next(counts, transitions),
        "per sample": netmoe.predict_next(counts, transitions),
        "oracle": actual,
    }
    found = {name: _saved(counts, actual, prediction, experts, cluster) for name, prediction in predictions.items()}
    room = np.full(cluster.num_devices, 4)
    return {
        **found,
        "bound": netmoe.locality(netmoe.traffic_of(counts, experts, cluster, next_counts=actual), room, cluster).share,
    }


def _saved(counts: Array, actual: Array, predicted: Array | None, experts: Array, cluster: Cluster) -> float:
    """The share of blind copies between nodes saved over both exchanges by homes that see a prediction."""
    home = netmoe.solve(counts, experts, cluster, next_counts=predicted).device_of_sample
    traffic = netmoe.traffic_of(counts, experts, cluster, next_counts=actual)
    copies = sum(netmoe.volumes(x, home, cluster).inter for x in traffic.exchanges)
    room = np.full(cluster.num_devices, -(-len(counts) // cluster.num_devices))
    return 1 - copies / netmoe.locality(traffic, room, cluster).blind


def _real(read: Callable[[Path], Array], settings: Settings) -> list[tuple[Cluster, Array]]:
    steps = read(settings.data)[: 2 if settings.quick else None]
    return [(Cluster(nodes, 8 // nodes), steps) for nodes in (2, 4)]


def _real_rows(instance: tuple[Cluster, Array]) -> Iterator[Row]:
    """Means over steps `[B, L, I, E]` and pairs of layers."""
    cluster, steps = instance
    experts = np.arange(steps.shape[3]) * cluster.num_devices // steps.shape[3]
    room = np.full(cluster.num_devices, steps.shape[2] // cluster.num_devices)
    pairs = [(layers[at], layers[at + 1]) for layers in steps for at in range(len(layers) - 1)]
    traffic = [netmoe.traffic_of(here, experts, cluster, next_counts=there) for here, there in pairs]
    bound = fmean(netmoe.locality(one, room, cluster).share for one in traffic)
    for method, knows in (("none", False), ("oracle", True)):
        saved = [_saved(here, there, there if knows else None, experts, cluster) for here, there in pairs]
        yield Row(f"{cluster}, {len(pairs)} layer steps", method, quality=fmean(saved), bound=bound)


def _clusters(settings: Settings) -> list[tuple[Cluster, int]]:
    return [(Cluster.parse(f"{nodes}x8", LINKS), 3 if settings.quick else SEEDS) for nodes in (2, 4)]


STUDIES = (
    Study(
        title="Table 4: the solver's seconds",
        quality=COPIES_SAVED,
        baseline="km",
        note="Seconds of each solver, beside those that the paper can hide it in. "
        "Both stages on 2x8 devices, the cost matrix given; the paper has its scatter and computation to hide the"
        " solver in, 3.7 to 41.7 ms. Saved of blind dealing; the bound is the locality index.",
        instances=lambda settings: TABLE_4[: 2 if settings.quick else None],
        rows=_table_4,
    ),
    Study(
        title="Table 5: volumes and reductions",
        quality=COPIES_SAVED,
        baseline="paper (km)",
        note="Bytes between nodes with and without moving samples, as in the paper's Table 5. "
        "Of uniform routing's (1 - 1/N) I L K H bytes (L = 1024, K = 2, H = 768, a byte an element); samples"
        " Dirichlet(3 / E), I = 4 J; mean over 20 steps, spread: one standard deviation over them. The paper reports 34"
        " to 43 %. Whole calls of `netmoe.solve`.",
        instances=_clusters,
        rows=_table_5,
    ),
    Study(
        title="Busiest port: what the bottleneck objective gains over the sum",
        quality="seconds of the busiest ports, s",
        baseline="sum",
        note="Seconds of the busiest ports under each objective, on generated samples. "
        "Eq. 5 with links of 400 GB/s and 2 us, 100 GB/s and 5 us, 1,536 bytes a copy; means over steps."
        " Seconds are of the first step's solve, bounds included.",
        instances=_synthetic_steps,
        rows=_busiest,
    ),
    Study(
        title="Busiest port on real counts",
        quality="seconds of the busiest ports, s",
        baseline="sum",
        note="Seconds of the busiest ports under each objective, on recorded counts. "
        "OLMoE-1B-7B, experts contiguous, steps of 64 samples, three layers.",
        needs=OLMOE,
        instances=_real_steps,
        rows=_busiest,
    ),
    Study(
        title="Ablation: what the homes know of the next layer",
        quality=COPIES_SAVED,
        note="Copies saved by what the homes know of the next layer, on generated samples. "
        "Over both exchanges. Preferences persist across layers by construction. A global frequency adds the same"
        " to every choice: it must equal none.",
        instances=_clusters,
        rows=_ablation,
    ),
    *(
        Study(
            title=f"Real counts: {name}",
            quality=COPIES_SAVED,
            note="Copies saved by what the homes know of the next layer, on recorded counts. "
            "Over both exchanges, experts contiguous, steps of 64 samples; the bound is the locality index.",
            needs=needs,
            instances=partial(_real, read),
            rows=_real_rows,
        )
        for name, needs, read in (("OLMoE-1B-7B", OLMOE, olmoe), ("SmartMoE's GPT-MoE training", SMARTMOE, smartmoe))
    ),
)
