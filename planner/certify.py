"""Certification: everything a plan claims, recomputed by other code than made it.

The placement rules are read off the plan's own lists, the trace is recounted by `planner.recount`, shares, intervals,
gain and verdict are computed here again. Only the baselines' placements come from their solvers: a baseline
*is* that algorithm's output.
"""

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import CertificationError, InputError, MismatchError
from ..runtime.plan import Contender, Part, Plan
from ..solvers import contiguous, eplb
from ..traces.reader import Trace, open_trace
from .certificate import TOLERANCE, Certificate
from .recount import Layout, Ledger, Roster, enroll, recount, tokens_of
from .recount_metrics import quantiles, recounted_metrics

__all__ = ["certifiable_trace", "certify"]

Holders = list[list[list[int]]]
Draws = dict[str, NDArray[np.float64]]


def certify(
    plan: Plan, trace: str | os.PathLike[str] | None = None, *, on_progress: Callable[[str], None] = lambda _: None
) -> Certificate:
    """Recompute what a plan claims.

    Parameters
    ----------
    trace
        The trace it was made from; None checks the structure only.

    Raises
    ------
    CertificationError
        A rule is broken or a figure is not what the trace gives.
    MismatchError
        The trace is not the one the plan names.
    """
    certificate = Certificate()
    _check_structure(plan, certificate)
    if trace is None:
        return certificate
    opened = open_trace(trace)
    claimed = plan.inputs.trace
    if claimed is None or opened.sha256 != claimed.sha256:
        expected = claimed.sha256[:12] if claimed else "no trace"
        raise MismatchError(
            f"{trace}: hash {opened.sha256[:12]}.., the plan was made from {expected}..; give the trace it was made"
            " from (how it fares on another one is a comparison, not a certificate)"
        )
    if opened.num_tokens != claimed.num_tokens or opened.model != plan.model:
        raise CertificationError(f"{trace}: {opened.num_tokens} tokens of {opened.model.name}; the plan says otherwise")
    certificate.checks.append("trace hash")
    _check_evaluation(plan, opened, certificate, on_progress)
    return certificate


def certifiable_trace(plan: Plan) -> str | None:
    """The path of the plan's own trace where it is still there with its hash."""
    source = plan.inputs.trace
    if source is None:
        return None
    try:
        return source.path if open_trace(source.path).sha256 == source.sha256 else None
    except InputError:
        return None


def _check_structure(plan: Plan, certificate: Certificate) -> None:
    """Placement rules and outcome arithmetic, from the plan alone."""
    if plan.decisions.placement is not None:
        rows = plan.decisions.placement.physical_to_logical
        for layer, held in enumerate(_holders(rows, _widths(plan), plan.model.num_experts)):
            if missing := [expert for expert, devices in enumerate(held) if not devices]:
                raise CertificationError(f"layer {layer}: expert {missing[0]} is on no device")
            if twice := [expert for expert, devices in enumerate(held) if len(set(devices)) < len(devices)]:
                raise CertificationError(f"layer {layer}: expert {twice[0]} is twice on one device")
        certificate.checks.append("placement rules")
    for decision, outcome in plan.outcome.items():
        value, bound = outcome.objective.value, outcome.bound
        if bound is None:
            continue
        beaten = value - bound if outcome.objective.sense == "max" else bound - value
        if beaten > TOLERANCE * max(abs(bound), 1):
            raise CertificationError(f"outcome of {decision}: value {value} is better than its bound {bound}")
        scale = max(abs(value), abs(bound))
        certificate.agree(f"gap of {decision}", outcome.gap, abs(bound - value) / scale if scale else 0.0)
        certificate.checks.append(f"gap of {decision}")


def _check_evaluation(plan: Plan, trace: Trace, certificate: Certificate, on_progress: Callable[[str], None]) -> None:
    if plan.evaluation is None:
        return
    on_progress("recounting the fitted samples")
    layouts = _layouts(plan, trace)
    draws = _check_part(plan, trace, plan.evaluation.fit, layouts, certificate, fit=True)
    _check_objective(plan, plan.evaluation.fit, certificate)
    if plan.evaluation.held_out is not None:
        on_progress("recounting the held-out samples")
        draws = _check_part(plan, trace, plan.evaluation.held_out, layouts, certificate, fit=False)
    certificate.checks.append("metrics of every contender")
    _check_verdict(plan, draws, certificate)


def _check_part(
    plan: Plan, trace: Trace, part: Part, layouts: Mapping[str, Layout], certificate: Certificate, *, fit: bool
) -> dict[str, Draws]:
    name = "fit" if fit else "held out"
    roster = _roster(plan, trace, fit=fit)
    certificate.agree(f"{name}: tokens", part.num_tokens, roster.num_tokens)
    certificate.agree(f"{name}: samples", part.num_samples, len(roster.ordinal_of))
    certificate.agree(f"{name}: steps", part.num_steps, roster.num_steps)
    certificate.agree(f"{name}: dropped samples", part.dropped_samples, roster.num_dropped)
    ledgers = recount(tokens_of(trace, roster, _phases(plan)), roster, plan.model.num_layers, layouts)
    return {
        label: _check_contender(plan, f"{name}: {label}", ledgers[label], contender, certificate)
        for label, contender in _labelled(part).items()
    }


def _check_contender(plan: Plan, label: str, ledger: Ledger, contender: Contender, certificate: Certificate) -> Draws:
    """Every metric of a contender with its interval; returns the resampled figures, and the values under "=name"."""
    value, draws = recounted_metrics(plan, ledger, coherent=contender.dispatch_model == "coherent")
    if value.keys() != contender.metrics.keys():
        raise CertificationError(f"{label}: metrics {sorted(contender.metrics)}; the recount gives {sorted(value)}")
    for name, metric in contender.metrics.items():
        low, high = quantiles(draws.get(name))
        certificate.agree(f"{label}: {name}", metric.value, value[name])
        certificate.agree(f"{label}: {name} low", metric.low, low)
        certificate.agree(f"{label}: {name} high", metric.high, high)
    return draws | {f"={name}": np.array([found]) for name, found in value.items()}


def _check_objective(plan: Plan, fit: Part, certificate: Certificate) -> None:
    """What the solver claims of the fitted transitions is what they show (without replicas; with them it expects)."""
    outcome, decision = plan.outcome.get("placement"), plan.decisions.placement
    metrics = fit.contenders[0].metrics
    if outcome is None or decision is None or "hops_kept" not in metrics:
        return
    if len(decision.physical_to_logical[0]) > plan.model.num_experts:
        return
    kept, on_node = metrics["hops_kept"].value, metrics["node_hops_kept"].value
    found = {"hops_kept": kept, "hop_cost": (1 - on_node) * _inter_ratio(plan) + on_node - kept}
    if outcome.objective.name in found:
        certificate.agree("objective", outcome.objective.value, found[outcome.objective.name])
        certificate.checks.append("objective")


def _inter_ratio(plan: Plan) -> float:
    """What a hop between nodes costs in hops inside one: the links' seconds a byte, 8 where they are unknown."""
    links = plan.cluster.links
    if not {"intra", "inter"} <= set(links):
        return 8.0
    return max(links["inter"].s_per_byte / links["intra"].s_per_byte, 1.0)


def _check_verdict(plan: Plan, draws: Mapping[str, Draws], certificate: Certificate) -> None:
    claimed = plan.verdict
    if claimed is None:
        return
    ours, theirs = draws[f"plan/{plan.dispatch_model}"], draws[claimed.against]
    paired = claimed.metric in ours and claimed.metric in theirs
    low, high = quantiles(theirs[claimed.metric] - ours[claimed.metric]) if paired else (None, None)
    gain = float(theirs[f"={claimed.metric}"][0] - ours[f"={claimed.metric}"][0])
    certificate.agree("gain", claimed.gain.value, gain)
    certificate.agree("gain low", claimed.gain.low, low)
    certificate.agree("gain high", claimed.gain.high, high)
    if (claimed.value == "benefit") != (low is not None and low > 0):
        raise CertificationError(f"verdict {claimed.value} with a gain from {low}; a benefit needs a gain above 0")
    certificate.checks.append("verdict")


def _labelled(part: Part) -> dict[str, Contender]:
    return {f"{contender.name}/{contender.dispatch_model}": contender for contender in part.contenders}


def _phases(plan: Plan) -> list[str]:
    phases: list[str] = plan.options["evaluation"]["phases"]
    return phases


def _roster(plan: Plan, trace: Trace, *, fit: bool) -> Roster:
    assert plan.inputs.trace is not None
    split = plan.inputs.trace.split
    return enroll(
        trace,
        seed=split.seed,
        fraction=split.fit_fraction,
        fit=fit,
        num_devices=plan.cluster.num_devices,
        samples_per_step=plan.options["evaluation"]["samples_per_step"],
        phases=_phases(plan),
    )


def _layouts(plan: Plan, trace: Trace) -> dict[str, Layout]:
    """The placement of every contender; baselines are made again from the fitted tokens."""
    assert plan.evaluation is not None
    assert plan.decisions.placement is not None
    decision, num_experts = plan.decisions.placement, plan.model.num_experts
    slots_D, num_layers = np.array(_widths(plan)), plan.model.num_layers
    baselines = {
        "contiguous": contiguous.solve(num_layers, num_experts, plan.cluster, slots=slots_D).placement,
        "eplb": eplb.solve(_fitted_loads(plan, trace), plan.cluster, slots=slots_D).placement,
    }
    layouts = {}
    for label, contender in _labelled(plan.evaluation.fit).items():
        made = baselines.get(contender.name)
        rows = decision.physical_to_logical if made is None else made.physical_to_logical.tolist()
        layouts[label] = Layout(
            coherent=contender.dispatch_model == "coherent",
            nearest=(decision if made is None else made).replica_rule == "nearest",
            holders=_holders(rows, _widths(plan), num_experts),
            num_devices=plan.cluster.num_devices,
            devices_per_node=plan.cluster.devices_per_node,
        )
    return layouts


def _fitted_loads(plan: Plan, trace: Trace) -> NDArray[np.int64]:
    """Tokens of every expert over the fitted samples, `[L, E]`."""
    loads_LE = np.zeros((plan.model.num_layers, plan.model.num_experts), np.int64)
    for tokens in tokens_of(trace, _roster(plan, trace, fit=True), _phases(plan)):
        for layer, row in enumerate(loads_LE):
            ids = tokens.ids[:, layer]
            np.add.at(row, ids[ids < len(row)], 1)
    return loads_LE


def _widths(plan: Plan) -> list[int]:
    assert plan.decisions.placement is not None
    slots = plan.decisions.placement.slots_per_device
    return [slots] * plan.cluster.num_devices if isinstance(slots, int) else list(slots)


def _holders(rows: Sequence[Sequence[int]], widths: list[int], num_experts: int) -> Holders:
    """The devices that hold each expert, `[layer][expert]`, from the expert in each slot."""
    device_of_slot = [device for device, width in enumerate(widths) for _ in range(width)]
    layers: Holders = []
    for row in rows:
        held: list[list[int]] = [[] for _ in range(num_experts)]
        for device, expert in zip(device_of_slot, row, strict=True):
            held[expert].append(device)
        layers.append(held)
    return layers
