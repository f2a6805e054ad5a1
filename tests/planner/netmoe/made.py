"""Sample policies as tests make them, and traces whose samples like some experts."""

from pathlib import Path
from typing import Any

import numpy as np

from moeplan.planner.request import Request
from moeplan.planner.solve import Made, make
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Part, Plan
from moeplan.traces.count_form import CountTable, CountTrace, read_counts, write_counts
from moeplan.traces.model import ModelSpec
from moeplan.traces.reader import Trace
from moeplan.traces.schema import TraceMeta


def solved(trace: Trace | CountTrace, cluster: str = "2x2", links: tuple[str, ...] = (), **options: Any) -> Made:
    """The policy of a trace."""
    request = Request(strategy="netmoe", trace=trace.path, cluster=Cluster.parse(cluster, links), **options)
    return make(request)


def judged(plan: Plan) -> dict[str, dict[str, float]]:
    """Label and metric to value on the part that judges."""
    assert plan.evaluation is not None
    part = plan.evaluation.judging
    return {c.label: {name: metric.value for name, metric in c.metrics.items()} for c in part.contenders}


def part_of(plan: Plan) -> Part:
    """The held-out part."""
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    return plan.evaluation.held_out


def generated(
    folder: Path, *, alpha: float, samples: int = 256, layers: int = 3, seed: int = 0, uneven: bool = False
) -> CountTrace:
    """Counts of samples with preferences Dirichlet(alpha / E) that a chain of experts carries from layer to layer; the
    samples have 256 tokens each, or 16 to 1024.
    """
    rng = np.random.default_rng(seed)
    experts, chain = 8, rng.dirichlet(np.full(8, 0.1), (layers - 1, 8))
    counts = np.zeros((samples, layers, experts), np.int64)
    for i in range(samples):
        length = int(2 ** rng.uniform(5, 11)) if uneven else 512
        counts[i, 0] = rng.multinomial(length, rng.dirichlet(np.full(experts, alpha / experts)))
        for layer in range(1, layers):
            counts[i, layer] = sum(map(rng.multinomial, counts[i, layer - 1], chain[layer - 1]))
    model = ModelSpec(
        name="generated", layer_ids=tuple(range(layers)), num_experts=8, top_k=2, hidden_size=64, dtype_bytes=2
    )
    table = CountTable(
        sample=np.repeat(np.arange(samples), layers),
        layer=np.tile(np.arange(layers, dtype=np.int32), samples),
        counts=counts.reshape(-1, experts),
    )
    write_counts(folder, TraceMeta(form="counts", model=model, recorder="test"), [table])
    return read_counts(folder)
