"""Plans of legal random placements, and the models that their engines serve."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from moeplan.profilers.cluster import Cluster
from moeplan.runtime.decisions import PipelineDecision
from moeplan.runtime.exports import Expected
from moeplan.runtime.plan import Plan
from moeplan.traces.model import ModelSpec
from tests.runtime.plans import made_plan, random_placement

ENGINES_OF_PLACEMENTS = ("sglang", "vllm", "vllm-ascend", "tensorrt-llm")


def model_of(*, layers: int = 3, experts: int = 8, dense: int = 1, mtp: int | None = 0, **known: Any) -> ModelSpec:
    """A model whose first `dense` hidden layers have no experts."""
    told = {"num_hidden_layers": dense + layers, "num_mtp_layers": mtp, "top_k": 2} | known
    return ModelSpec(name="random", layer_ids=tuple(range(dense, dense + layers)), num_experts=experts, **told)


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
    placement = random_placement(spec.num_layers, spec.num_experts, each, seed=seed)
    options = decided.pop("options", {"placement": {"dispatch_model": dispatch}})
    return made_plan(where, spec, options=options, **{"placement": placement} | decided)


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
        layers=draw(st.integers(1, 4)), experts=experts, dense=draw(st.integers(0, 2)), mtp=draw(st.integers(0, 2))
    )
    return plan_of(cluster=f"{nodes}x{local}", slots=slots, model=model, seed=draw(st.integers(0, 99)))
