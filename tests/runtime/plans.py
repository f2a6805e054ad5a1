"""Plans that tests of the runtime make by hand, and random placements for them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moeplan.profilers.cluster import Cluster
from moeplan.runtime.decisions import Decisions, PlacementDecision, RebalancingDecision
from moeplan.runtime.plan import Inputs, Plan, Verdict
from moeplan.solvers.flexmoe import Costs
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.traces.model import ModelSpec

# Of small experts that take long: what evens the load pays, and no replica is free.
COSTS = Costs(
    pair_s=1e-5,
    copy_bytes=64.0,
    intra_latency_s=1e-6,
    intra_s_per_byte=1e-9,
    inter_latency_s=2e-6,
    inter_s_per_byte=4e-9,
    gradient_bytes=3e3,
    intra_sum_s_per_byte=1e-9,
    inter_sum_s_per_byte=4e-9,
    moved_bytes=5e3,
)


def made_plan(
    cluster: Cluster,
    model: ModelSpec,
    placement: Placement | PlacementDecision | None = None,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    verdict: Verdict | None = None,
    **decisions: Any,
) -> Plan:
    """A plan of these decisions, made from nothing and judged by nobody."""
    placed = PlacementDecision.of(placement) if isinstance(placement, Placement) else placement
    return Plan.make(
        strategies=(),
        seed=seed,
        cluster=cluster,
        model=model,
        inputs=Inputs(),
        decisions=Decisions(placement=placed, **decisions),
        options=options or {},
        verdict=verdict,
    )


def eager(start: PlacementDecision, **changes: Any) -> RebalancingDecision:
    """A policy that looks at every step and changes what pays."""
    fields: dict[str, Any] = {"method": "search", "trigger": 1.0, "horizon_steps": 300.0, "window": 3, "every": 1}
    fields |= {"evaluations": 40, "costs": COSTS._asdict()}
    return RebalancingDecision(start=start, **fields | changes)


def random_placement(
    num_layers: int, num_experts: int, slots: Sequence[int], *, rule: str = "even", seed: int = 0
) -> Placement:
    """All experts in random order, then slots that remain filled with experts that their device lacks."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(num_layers):
        row = [part.tolist() for part in np.split(rng.permutation(num_experts), np.cumsum(slots)[:-1])]
        for part, size in zip(row, slots, strict=True):
            part += rng.permutation(np.setdiff1d(np.arange(num_experts), part))[: size - len(part)].tolist()
        rows.append(row)
    return Placement.from_sets(rows, num_experts, ReplicaRule(rule))
