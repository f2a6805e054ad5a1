"""What can be checked of a plan without its trace: placement rules, outcome arithmetic, and its options."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ...errors import CertificationError
from ...runtime.decisions import Record
from ...runtime.plan import Contender, Part, Plan
from ...solvers.outcome import Outcome, Status
from ..options import EvaluationOptions, PipelineOptions, PlacementOptions, SecondsOptions
from .certificate import TOLERANCE, Certificate

__all__ = [
    "Holders",
    "check_structure",
    "device_ratios",
    "evaluation_options",
    "holders_of",
    "judged_metric",
    "keeps_pairs",
    "labelled",
    "parsed_options",
    "pipeline_options",
    "placement_options",
    "seconds_options",
    "slot_widths",
    "step_ratios",
]

Holders = list[list[list[int]]]
Rows = Sequence[Sequence[int]] | NDArray[np.integer]  # [layer][slot]
Options = TypeVar("Options", bound=Record)


def check_structure(plan: Plan, certificate: Certificate) -> None:
    """Refuse a plan that breaks a placement rule or the arithmetic of an outcome."""
    if plan.decisions.placement is not None:
        rows = plan.decisions.placement.physical_to_logical
        for layer, held in enumerate(holders_of(rows, slot_widths(plan), plan.model.num_experts)):
            if missing := [expert for expert, devices in enumerate(held) if not devices]:
                raise CertificationError(f"layer {layer}: expert {missing[0]} is on no device")
            if twice := [expert for expert, devices in enumerate(held) if len(set(devices)) < len(devices)]:
                raise CertificationError(f"layer {layer}: expert {twice[0]} is twice on one device")
        certificate.checks.append("placement rules")
    for decision, outcome in plan.outcome.items():
        _check_arithmetic(decision, outcome, certificate)


def evaluation_options(plan: Plan) -> EvaluationOptions:
    """How the plan says it was judged."""
    return parsed_options(plan, "evaluation", EvaluationOptions)


def seconds_options(plan: Plan) -> SecondsOptions:
    """How the plan says its seconds were predicted."""
    return parsed_options(plan, "seconds", SecondsOptions)


def placement_options(plan: Plan) -> PlacementOptions:
    """How the plan says its placement was decided."""
    return parsed_options(plan, "placement", PlacementOptions)


def keeps_pairs(plan: Plan) -> bool:
    """Whether the placement is to save copies, for which pairs of experts of one layer count, or hops alone."""
    search = placement_options(plan).search
    return search is not None and search.objective == "copies"


def pipeline_options(plan: Plan) -> PipelineOptions:
    """How the plan says its degrees were decided."""
    return parsed_options(plan, "pipeline", PipelineOptions)


def parsed_options(plan: Plan, name: str, kind: type[Options]) -> Options:
    """The options of that name."""
    try:
        return kind.model_validate(dict(plan.options.get(name, {})))
    except ValidationError as error:
        raise CertificationError(f"options.{name}: {error.error_count()} values missing or wrong") from error


def labelled(part: Part) -> dict[str, Contender]:
    """The contenders by their labels."""
    return {contender.label: contender for contender in part.contenders}


def judged_metric(plan: Plan, ours: str, against: str, otherwise: str) -> str:
    """`step_s` where both have it, of comparable parts, on the part that judges; else the other."""
    assert plan.evaluation is not None
    found = labelled(plan.evaluation.judging)
    pair = [found.get(ours), found.get(against)]
    there = [set() if one is None else {"step_s", "attention_s"} & one.metrics.keys() for one in pair]
    if there[0] != there[1] or "step_s" not in there[0]:
        return otherwise
    alike = len({one.dispatch_model for one in pair if one is not None}) == 1
    return "step_s" if "attention_s" in there[0] or alike else otherwise


def slot_widths(plan: Plan) -> list[int]:
    """The slots of every device; without a placement, as many on each as contiguous needs."""
    decision = plan.decisions.placement
    if decision is None:
        return [-(-plan.model.num_experts // plan.cluster.num_devices)] * plan.cluster.num_devices
    slots = decision.slots_per_device
    return [slots] * plan.cluster.num_devices if isinstance(slots, int) else list(slots)


def holders_of(rows: Rows, widths: list[int], num_experts: int) -> Holders:
    """The devices that hold each expert, `[layer][expert]`, from the expert in each slot."""
    device_of_slot = [device for device, width in enumerate(widths) for _ in range(width)]
    layers: Holders = []
    for row in rows:
        held: list[list[int]] = [[] for _ in range(num_experts)]
        for device, expert in zip(device_of_slot, row, strict=True):
            held[expert].append(device)
        layers.append(held)
    return layers


def device_ratios(plan: Plan, loads: NDArray[np.int64], rows: Rows | None = None) -> list[float]:
    """The busiest device over the mean of devices with slots in every layer, replicas sharing loads `[L, E]` alike.

    `rows` are the expert in each slot; None: as in the plan.
    """
    ratios: list[float] = step_ratios(plan, loads[None], rows)[0].tolist()
    return ratios


def step_ratios(plan: Plan, loads: NDArray[np.int64], rows: Rows | None = None) -> NDArray[np.float64]:
    """The same step by step `[B, L]`, of loads `[B, L, E]`; 1 where nothing is routed."""
    assert plan.decisions.placement is not None
    widths, found = slot_widths(plan), np.ones(loads.shape[:2])
    rows = plan.decisions.placement.physical_to_logical if rows is None else rows
    for layer, held in enumerate(holders_of(rows, widths, plan.model.num_experts)):
        device_load = np.zeros((len(loads), len(widths)))
        for expert, devices in enumerate(held):
            for device in devices:
                device_load[:, device] += loads[:, layer, expert] / len(devices)
        used = device_load[:, [device for device, width in enumerate(widths) if width]]
        routed = used.any(axis=1)
        found[routed, layer] = used[routed].max(axis=1) * used.shape[1] / used[routed].sum(axis=1)
    return found


def _check_arithmetic(decision: str, outcome: Outcome, certificate: Certificate) -> None:
    """A value is never better than its bound, the gap follows from both, and optimal means that they meet."""
    value, bound = outcome.objective.value, outcome.bound
    if bound is None:
        if outcome.gap is not None or outcome.status is Status.OPTIMAL:
            raise CertificationError(f"outcome of {decision}: a gap or an optimum without a bound")
        return
    beaten = value - bound if outcome.objective.sense == "max" else bound - value
    if beaten > TOLERANCE * max(abs(bound), 1):
        raise CertificationError(f"outcome of {decision}: value {value} is better than its bound {bound}")
    scale = max(abs(value), abs(bound))
    gap = abs(bound - value) / scale if scale else 0.0
    certificate.agree(f"gap of {decision}", outcome.gap, gap)
    if (outcome.status is Status.OPTIMAL) != (gap <= TOLERANCE):
        raise CertificationError(f"outcome of {decision}: status {outcome.status} with a gap of {gap:.3g}")
    certificate.checks.append(f"gap of {decision}")
