"""Plans of legal random placements, and the models that their engines serve."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from moeplan.profilers.cluster import Cluster
from moeplan.runtime.decisions import Decisions, PipelineDecision, PlacementDecision
from moeplan.runtime.exports import Expected
from moeplan.runtime.plan import Inputs, Plan
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.traces.model import ModelSpec

ENGINES_OF_PLACEMENTS = ("sglang", "vllm", "vllm-ascend", "tensorrt-llm")


def model_of(*, layers: int = 3, experts: int = 8, dense: int = 1, mtp: int | None = 0, **known: Any) -> ModelSpec:
    """A model whose first `dense` hidden layers have no experts."""
    told = {"num_hidden_layers": dense + layers, "num_mtp_layers": mtp, "top_k": 2} | known
    return ModelSpec(name="random", layer_ids=tuple(range(dense, dense + layers)), num_experts=experts, **told)


def random_placement(rng: np.random.Generator, layers: int, experts: int, slots: list[int]) -> Placement:
    """All experts dealt round, the slots that remain filled with experts that their device lacks."""
    rows = []
    for _ in range(layers):
        held: list[set[int]] = [set() for _ in slots]
        device = 0
        for expert in rng.permutation(experts).tolist():
            while len(held[device % len(slots)]) == slots[device % len(slots)]:
                device += 1
            held[device % len(slots)].add(expert)
            device += 1
        for have, number in zip(held, slots, strict=True):
            lacking = [expert for expert in range(experts) if expert not in have]
            have.update(rng.choice(lacking, size=number - len(have), replace=False).tolist() if lacking else ())
        rows.append([sorted(have) for have in held])
    return Placement.from_sets(rows, experts, ReplicaRule.EVEN)


def plan_of(
    *,
    cluster: str = "1x4",
    slots: int | list[int] = 2,
    model: ModelSpec | None = None,
    seed: int = 0,
    dispatch: str = "standard",
    **decided: Any,
) -> Plan:
    """A plan of a random placement, or of what is `decided` instead."""
    spec, where = model or model_of(), Cluster.parse(cluster)
    each = [slots] * where.num_devices if isinstance(slots, int) else slots
    placement = random_placement(np.random.default_rng(seed), spec.num_layers, spec.num_experts, each)
    options = decided.pop("options", {"placement": {"dispatch_model": dispatch}})
    decisions = Decisions(**({"placement": PlacementDecision.of(placement)} | decided))
    return Plan.make(
        strategies=("eplb",), seed=0, cluster=where, model=spec, inputs=Inputs(), decisions=decisions, options=options
    )


def degrees_plan(degrees: tuple[int, ...] = (1, 2, 4), **decided: Any) -> Plan:
    """A plan of pipeline degrees."""
    pipeline = PipelineDecision(forward=degrees, backward=None)
    options = {"pipeline": {"a2a_ffn_overlap_degree": list(degrees)}}
    model = model_of(layers=len(degrees))
    return plan_of(model=model, options=options, **({"placement": None, "pipeline": pipeline} | decided))


def expected_of(plan: Plan, **changed: Any) -> Expected:
    """What the files of a plan are validated for."""
    placement = plan.placement
    redundant = None if placement is None else placement.num_slots - plan.model.num_experts
    whole = Expected(model=plan.model, num_devices=plan.cluster.num_devices, redundant=redundant)
    return replace(whole, **changed)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of all small sizes, with replicas and dense layers."""
    nodes, local = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    experts = draw(st.integers(2, 10))
    least = -(-experts // (nodes * local))
    slots = draw(st.integers(least, experts))
    model = model_of(
        layers=draw(st.integers(1, 4)),
        experts=experts,
        dense=draw(st.integers(0, 2)),
        mtp=draw(st.integers(0, 2)),
    )
    return plan_of(cluster=f"{nodes}x{local}", slots=slots, model=model, seed=draw(st.integers(0, 99)))
