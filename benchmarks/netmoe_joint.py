"""NetMoE's homes and ExFlow's placement together: copies between nodes saved by either alone and by both.

Synthetic: two layers, samples Dirichlet(3 / E) whose preferences one transition matrix carries on (they persist across
layers by construction). Real: fitted on half of the samples, re-homed online on the others, the next layer predicted;
where the data holds counts only, transitions are those of copies without memory (`netmoe.sample_transitions`).

Run: python benchmarks/netmoe_joint.py [--seeds N] [--data DIR]
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np

from moeplan.planner.netmoe.counted import Counted, Traffic, count_samples
from moeplan.planner.netmoe.online import rehome
from moeplan.planner.netmoe.predictor import fit_predictor
from moeplan.planner.netmoe.roll import Roll, call_roll
from moeplan.planner.netmoe.tallied import tallied
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous, exflow, netmoe
from moeplan.solvers.placement import Placement
from moeplan.traces.count_form import CountTrace, open_any
from moeplan.traces.importers import import_trace
from moeplan.traces.reader import Trace

Array = np.ndarray
DEFAULT_DATA = Path(os.environ.get("MOEPLAN_DATA") or Path(__file__).parents[2] / "shared" / "data")
PAIRS, ALPHA = 2048, 3.0
FAR = 6  # the column of copies between nodes in a tally
SOURCES = {"gpt-oss-20b": "routing.npz", "olmoe-1b-7b": "per_sample_counts.npz"}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    options = parser.parse_args()
    print("copies between nodes saved of contiguous experts and blind homes")
    print(f"{'data':>12} {'devices':>8} {'placement':>10} {'homes':>7} {'both':>7} {'oracle':>7}")
    for nodes in (2, 4):
        cluster = Cluster(nodes, 8)
        for name, both_layers in (("next layer", False), ("both layers", True)):
            rows = [_synthetic(np.random.default_rng(seed), cluster, both_layers) for seed in range(options.seeds)]
            _print(name, cluster, np.mean(rows, axis=0))
    for name, file in SOURCES.items():
        if not (options.data / name / file).exists():
            print(f"no {name} in {options.data}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            import_trace(options.data / name / file, Path(folder, "trace"))
            for nodes in (2, 4):
                cluster = Cluster(nodes, 8 // nodes)
                _print(name, cluster, _real(open_any(Path(folder, "trace")), cluster))


def _print(name: str, cluster: Cluster, shares: Array) -> None:
    print(
        f"{name:>12} {cluster!s:>8} {shares[0]:10.3f}" + "".join(f" {share:7.3f}" for share in shares[1:]), flush=True
    )


def _synthetic(rng: np.random.Generator, cluster: Cluster, both_layers: bool) -> Array:
    """Both exchanges around one re-homing; experts placed by affinity in the next layer only, or in both."""
    num_experts, num_samples = 2 * cluster.num_devices, 4 * cluster.num_devices
    counts = rng.multinomial(PAIRS, rng.dirichlet(np.full(num_experts, ALPHA / num_experts), num_samples))
    transitions = rng.dirichlet(np.full(num_experts, 0.08), num_experts)
    following = np.array([sum(map(rng.multinomial, row, transitions)) for row in counts])
    here = np.arange(num_experts) // 2
    weight = counts.sum(axis=0)[:, None] * transitions
    if both_layers:
        placed = exflow.solve(weight[None], cluster, time_limit_s=5).placement
        before, after = (placed.holds(layer).argmax(axis=1) for layer in (0, 1))
    else:
        from_device = np.rint(weight.reshape(cluster.num_devices, 2, -1).sum(axis=1)).astype(np.int64)
        room = np.full(cluster.num_devices, 2)
        before, after = here, netmoe.two_stages(from_device.T.copy(), room, cluster.devices_per_node)
    room = np.full(cluster.num_devices, 4)
    start = netmoe.locality(netmoe.traffic_of(counts, here, cluster, next_counts=following), room, cluster).blind
    shares = []
    for first, second, homes in ((before, after, None), (here, here, "sample"), (before, after, "sample"),
                                 (before, after, "oracle")):  # fmt: skip
        traffic = netmoe.traffic_of(counts, first, cluster, next_counts=following, next_expert_to_device=second)
        if homes is None:
            shares.append(1 - netmoe.locality(traffic, room, cluster).blind / start)
            continue
        predicted = following if homes == "oracle" else netmoe.predict_next(counts, transitions)
        found = netmoe.solve(counts, first, cluster, next_counts=predicted, next_expert_to_device=second)
        copies = sum(netmoe.volumes(x, found.device_of_sample, cluster).inter for x in traffic.exchanges)
        shares.append(1 - copies / start)
    return np.array(shares)


def _real(trace: Trace | CountTrace, cluster: Cluster) -> Array:
    model, roll = trace.meta.model, call_roll(trace)
    fitted_I = roll.fitted(seed=0, fraction=0.5)
    plain = contiguous.solve(model.num_layers, model.num_experts, cluster).placement
    first = count_samples(trace, roll, fitted_I, {"contiguous": plain}, cluster)
    placed = _by_affinity(trace, roll, fitted_I, first, cluster)
    counted = count_samples(trace, roll, fitted_I, {"contiguous": plain, "plan": placed}, cluster)

    def far(where: str, how: str) -> float:
        return _far(roll, counted, where, how, fitted_I, cluster, model.top_k)

    start = far("contiguous", "stay")
    cases = (("plan", "stay"), ("contiguous", "sample"), ("plan", "sample"), ("plan", "oracle"))
    return np.array([1 - far(*case) / start for case in cases])


def _by_affinity(
    trace: Trace | CountTrace, roll: Roll, fitted_I: Array, counted: Counted, cluster: Cluster
) -> Placement:
    if isinstance(trace, Trace):
        from moeplan.traces.counts import count

        transitions = count(trace, keep=lambda ids: np.isin(ids, roll.sample[fitted_I])).transitions
    else:
        experts = counted.experts[fitted_I]
        pairs = zip(experts.transpose(1, 0, 2)[:-1], experts.transpose(1, 0, 2)[1:], strict=True)
        transitions = np.array([netmoe.sample_transitions(one, two) for one, two in pairs])
    return exflow.solve(transitions, cluster, time_limit_s=20).placement


def _far(roll: Roll, counted: Counted, where: str, how: str, fitted_I: Array, cluster: Cluster, top_k: int) -> float:
    """Copies between nodes on the held-out samples."""
    traffic: Traffic = counted.traffic[where]
    place = np.flatnonzero(~fitted_I)
    cohort = roll.cohort(place, num_devices=cluster.num_devices, samples_per_step=4 * cluster.num_devices)
    assert cohort.home is not None
    assert cohort.step is not None
    device = np.tile(cohort.home, (traffic.copies.shape[1] + 1, 1))
    if how != "stay":
        fit = fit_predictor(counted, traffic, fitted_I, top_k)

        def predict(layer: int, at: Array) -> Array | None:
            if how == "sample":
                return fit.copies(layer, counted.experts[at, layer])
            return traffic.copies[at, layer + 1].astype(float) if layer + 1 < traffic.copies.shape[1] else None

        device = rehome(
            "sum", traffic, place, cohort.home, cohort.step, cluster, predict=predict, copy_bytes=None
        ).device
    return float(tallied(roll, traffic, place, cohort, device, cluster).counts[:, FAR].sum())


if __name__ == "__main__":
    main()
