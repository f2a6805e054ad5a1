"""NetMoE's homes and ExFlow's placement together: copies between nodes saved by either alone and by both.

Synthetic: two layers, `generator`'s samples, whose preferences persist across layers by construction. Real: fitted on
half of the samples, re-homed online on the others, the next layer predicted; where the data holds counts only,
transitions are those of copies without memory (`netmoe.sample_transitions`).
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from moeplan.planner.evaluate.homes import HomeRule, Rehoming, stay
from moeplan.planner.evaluate.journey import Journey
from moeplan.planner.evaluate.step_size import StepSize
from moeplan.planner.evaluate.tally import COUNTS
from moeplan.planner.evaluate.traffic import SampleCounts, sample_tally
from moeplan.planner.evaluate.units import SampleIndex, index_samples
from moeplan.planner.strategies.netmoe.policy import fit_predictor
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous, exflow, netmoe
from moeplan.solvers.placement import Placement
from moeplan.traces.count_form import CountTrace, open_any
from moeplan.traces.importers import import_trace
from moeplan.traces.reader import Trace

from ..race import cpu_s
from ..routing import GPT_OSS, OLMOE, carried_on, expert_devices, sample_counts
from ..study import COPIES_SAVED, Row, Settings, Study

Array = np.ndarray
SEEDS = 5
CASES = {
    "placement": ("plan", "stay"),
    "homes": ("contiguous", "sample"),
    "both": ("plan", "sample"),
    "both, oracle": ("plan", "oracle"),
}  # where experts are, what homes know


def _synthetic(instance: tuple[Cluster, bool, int]) -> Iterator[Row]:
    """The mean over seeds of both exchanges around one re-homing."""
    cluster, both_layers, seeds = instance
    runs = [_step(np.random.default_rng(seed), cluster, both_layers) for seed in range(seeds)]
    name = f"{cluster} {'both layers' if both_layers else 'next layer'}"
    for method in CASES:
        saved, seconds = np.mean([run[method] for run in runs], axis=0)
        yield Row(name, method, quality=float(saved), seconds=float(seconds))


def _step(rng: np.random.Generator, cluster: Cluster, both_layers: bool) -> dict[str, tuple[float, float]]:
    """Saved and seconds of each case; experts placed by affinity in the next layer only, or in both."""
    counts = sample_counts(rng, cluster, 4)
    transitions, following = carried_on(rng, counts)
    plain, started = expert_devices(cluster), cpu_s()
    placed = _placed(counts.sum(axis=0)[:, None] * transitions, cluster, both_layers)
    place_s = cpu_s() - started
    room = np.full(cluster.num_devices, 4)
    start = netmoe.locality(netmoe.traffic_of(counts, plain, cluster, next_counts=following), room, cluster).blind
    found = {}
    for method, (where, knows) in CASES.items():
        first, second = placed if where == "plan" else (plain, plain)
        traffic = netmoe.traffic_of(counts, first, cluster, next_counts=following, next_expert_to_device=second)
        started = cpu_s()
        copies = netmoe.locality(traffic, room, cluster).blind
        if knows != "stay":
            predicted = following if knows == "oracle" else netmoe.predict_next(counts, transitions)
            started = cpu_s()
            home = netmoe.solve(counts, first, cluster, next_counts=predicted, next_expert_to_device=second)
            copies = sum(netmoe.volumes(x, home.device_of_sample, cluster).inter for x in traffic.exchanges)
        homes_s = cpu_s() - started if knows != "stay" else 0.0
        found[method] = 1 - copies / start, homes_s + (place_s if where == "plan" else 0.0)
    return found


def _placed(weight: Array, cluster: Cluster, both_layers: bool) -> tuple[Array, Array]:
    """The devices of this layer's experts and of the next's."""
    if both_layers:
        placed = exflow.solve(weight[None], cluster, time_limit_s=5, method="sweeps").placement
        return placed.holds(0).argmax(axis=1), placed.holds(1).argmax(axis=1)
    from_device = np.rint(weight.reshape(cluster.num_devices, 2, -1).sum(axis=1)).astype(np.int64)
    room = np.full(cluster.num_devices, 2)
    return np.arange(len(weight)) // 2, netmoe.two_stages(from_device.T.copy(), room, cluster.devices_per_node)


def _clusters(source: str, settings: Settings) -> list[tuple[Path, Cluster]]:
    sizes = (2,) if settings.quick else (2, 4)
    return [(settings.data / source, Cluster(nodes, 8 // nodes)) for nodes in sizes]


def _real(instance: tuple[Path, Cluster]) -> Iterator[Row]:
    source, cluster = instance
    with tempfile.TemporaryDirectory() as folder:
        import_trace(source, Path(folder, "trace"))
        far = _far(open_any(Path(folder, "trace")), cluster)
        start, _ = far("contiguous", "stay")
        for method, case in CASES.items():
            copies, seconds = far(*case)
            yield Row(f"{source.parent.name} {cluster}", method, quality=1 - copies / start, seconds=seconds)


def _far(trace: Trace | CountTrace, cluster: Cluster) -> Callable[[str, str], tuple[float, float]]:
    """A call from where experts are and what homes know to the copies between nodes, held out, and the seconds."""
    model, index = trace.meta.model, index_samples(trace)
    fitted_I = index.fitted(seed=0, fraction=0.5)
    counts = SampleCounts(trace, index, fitted_I, cluster)
    plain = contiguous.solve(model.num_layers, model.num_experts, cluster).placement
    counts.under(plain)
    placed, place_s = _by_affinity(trace, index, fitted_I, counts, cluster)
    counts.under(placed)
    size = cluster.num_devices
    cohort = index.cohort(~fitted_I, num_devices=size, size=StepSize("samples", 4 * size))

    def far(where: str, knows: str) -> tuple[float, float]:
        started, placement = cpu_s(), placed if where == "plan" else plain
        rule: HomeRule = stay
        if knows != "stay":
            assert counts.experts is not None
            predictor = fit_predictor(counts.experts, counts.under(placement), fitted_I, model.top_k)
            rule = Rehoming("sum", predictor, oracle=knows == "oracle")
        device_LI = np.zeros((model.num_layers + 1, len(fitted_I)), np.int64)
        device_LI[:, cohort.unit_ids] = rule(counts, placement, cohort).device
        tally = sample_tally(counts, Journey("migrating", placement, moves=device_LI), cohort)
        copies = float(tally.counts[:, COUNTS.index("far_copies")].sum())
        return copies, cpu_s() - started + (place_s if where == "plan" else 0.0)

    return far


def _by_affinity(
    trace: Trace | CountTrace, index: SampleIndex, fitted_I: Array, counts: SampleCounts, cluster: Cluster
) -> tuple[Placement, float]:
    """ExFlow's placement of the fitted samples, and the seconds of its solve."""
    if isinstance(trace, Trace):
        from moeplan.traces.counts import count

        transitions = count(trace, keep=lambda ids: np.isin(ids, index.sample[fitted_I])).transitions
    else:
        assert counts.experts is not None
        experts_LIE = counts.experts[fitted_I].transpose(1, 0, 2)
        transitions = np.array([netmoe.sample_transitions(one, two) for one, two in pairwise(experts_LIE)])
    started = cpu_s()
    return exflow.solve(transitions, cluster, time_limit_s=20, method="sweeps").placement, cpu_s() - started


def _generated(settings: Settings) -> list[tuple[Cluster, bool, int]]:
    seeds = 1 if settings.quick else SEEDS
    return [(Cluster(nodes, 8), both, seeds) for nodes in (2, 4) for both in (False, True)]


STUDIES = (
    Study(
        title="Synthetic",
        quality=COPIES_SAVED,
        note="Copies saved by a placement, by homes, and by both, on generated samples. "
        f"Of contiguous experts and blind homes, over both exchanges; mean over {SEEDS} steps, next predicted."
        " Experts of the next layer placed by affinity, or of both layers. Seconds: placement and homes of one step.",
        instances=_generated,
        rows=_synthetic,
    ),
    *(
        Study(
            title=name,
            quality=COPIES_SAVED,
            note="Copies saved by a placement, by homes, and by both, on recorded routing. "
            "Of contiguous experts and blind homes, held-out samples, online. Seconds: the placement's solve,"
            " the predictor's fit and all homes of the held-out steps.",
            needs=source,
            instances=partial(_clusters, source),
            rows=_real,
        )
        for name, source in (("gpt-oss-20b", GPT_OSS), ("OLMoE-1B-7B", OLMOE))
    ),
)
