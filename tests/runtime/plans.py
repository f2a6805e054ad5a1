"""The builder of plans that tests of the runtime make by hand."""

from collections.abc import Mapping
from typing import Any

from moeplan.profilers.cluster import Cluster
from moeplan.runtime.decisions import Decisions, PlacementDecision
from moeplan.runtime.plan import Inputs, Plan, Verdict
from moeplan.solvers.placement import Placement
from moeplan.traces.model import ModelSpec


def made_plan(
    cluster: Cluster,
    model: ModelSpec,
    placement: Placement | None = None,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    verdict: Verdict | None = None,
    **decisions: Any,
) -> Plan:
    """A plan of these decisions, made from nothing and judged by nobody."""
    placed = None if placement is None else PlacementDecision.of(placement)
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
