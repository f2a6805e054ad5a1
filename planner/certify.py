"""Certification: everything a plan claims, recomputed by other code than made it.

The placement rules are read off the plan's own lists, the trace is recounted by `planner.recount`, shares, intervals,
gain and verdict are computed here again. Only the baselines' placements come from their solvers: a baseline
*is* that algorithm's output.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import CertificationError, InputError, MismatchError
from ..runtime.plan import Contender, Part, Plan
from ..solvers import contiguous, eplb
from ..traces.reader import Trace, open_trace
from .recount import Layout, Tokens, read_part, recount
from .recount_metrics import quantiles, recounted_metrics

__all__ = ["Certificate", "certifiable_trace", "certify"]

TOLERANCE = 1e-9
Holders = list[list[list[int]]]
Draws = dict[str, NDArray[np.float64]]


@dataclass(slots=True)
class Certificate:
    """What was checked: names of the checks, figures recomputed, and the largest relative difference found."""

    checks: list[str] = field(default_factory=list)
    figures: int = 0
    largest_difference: float = 0.0

    def summary(self, plan: object, trace: object) -> str:
        """One line: what was checked, against what."""
        if trace is None:
            return f"certified {plan}: structure only ({', '.join(self.checks)}); no trace to hold its figures against"
        return (
            f"certified {plan} against {trace}: {self.figures} figures recomputed, largest relative difference"
            f" {self.largest_difference:.1g} ({', '.join(self.checks)})"
        )

    def agree(self, what: str, claimed: float | None, found: float | None) -> None:
        """Record a figure, refusing one that differs."""
        if (claimed is None) != (found is None):
            raise CertificationError(f"{what}: the plan says {claimed}, the recount {found}")
        if claimed is None or found is None:
            return
        difference = abs(claimed - found) / max(abs(claimed), abs(found), 1e-300)
        if difference > TOLERANCE:
            raise CertificationError(
                f"{what}: the plan says {claimed:.12g}, the recount {found:.12g}; the plan was not made from this"
                " trace by this version, or was edited. Re-run moeplan solve"
            )
        self.figures += 1
        self.largest_difference = max(self.largest_difference, difference)


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
    fit = _tokens(plan, trace, fit=True)
    layouts = _layouts(plan, fit)
    on_progress("recounting the fitted samples")
    draws = _check_part(plan, "fit", plan.evaluation.fit, fit, layouts, certificate)
    _check_objective(plan, plan.evaluation.fit, certificate)
    if plan.evaluation.held_out is not None:
        on_progress("recounting the held-out samples")
        held_out = _tokens(plan, trace, fit=False)
        draws = _check_part(plan, "held out", plan.evaluation.held_out, held_out, layouts, certificate)
    certificate.checks.append("metrics of every contender")
    _check_verdict(plan, draws, certificate)


def _check_part(
    plan: Plan, name: str, part: Part, tokens: Tokens, layouts: Mapping[str, Layout], certificate: Certificate
) -> dict[str, Draws]:
    certificate.agree(f"{name}: tokens", part.num_tokens, len(tokens.unit))
    certificate.agree(f"{name}: samples", part.num_samples, tokens.num_units)
    certificate.agree(f"{name}: steps", part.num_steps, tokens.num_steps)
    certificate.agree(f"{name}: dropped samples", part.dropped_samples, tokens.num_dropped)
    draws = {}
    for contender in part.contenders:
        label = f"{contender.name}/{contender.dispatch_model}"
        draws[label] = _check_contender(plan, f"{name}: {label}", tokens, contender, layouts[label], certificate)
    return draws


def _check_contender(
    plan: Plan, label: str, tokens: Tokens, contender: Contender, layout: Layout, certificate: Certificate
) -> Draws:
    """Every metric of a contender with its interval; returns the resampled figures, and the values under "=name"."""
    value, draws = recounted_metrics(plan, tokens, recount(tokens, layout), coherent=layout.coherent)
    if value.keys() != contender.metrics.keys():
        raise CertificationError(f"{label}: metrics {sorted(contender.metrics)}; the recount gives {sorted(value)}")
    for name, metric in contender.metrics.items():
        low, high = quantiles(draws.get(name))
        certificate.agree(f"{label}: {name}", metric.value, value[name])
        certificate.agree(f"{label}: {name} low", metric.low, low)
        certificate.agree(f"{label}: {name} high", metric.high, high)
    return draws | {f"={name}": np.array([found]) for name, found in value.items()}


def _check_objective(plan: Plan, fit: Part, certificate: Certificate) -> None:
    """The share of hops the solver claims is the share the fitted tokens show (one copy an expert, first choices)."""
    outcome = plan.outcome.get("placement")
    decision = plan.decisions.placement
    if outcome is None or decision is None or outcome.objective.name != "hops_kept":
        return
    if len(decision.physical_to_logical[0]) == plan.model.num_experts and "hops_kept" in fit.contenders[0].metrics:
        certificate.agree("objective", outcome.objective.value, fit.contenders[0].metrics["hops_kept"].value)
        certificate.checks.append("objective")


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


def _tokens(plan: Plan, trace: Trace, *, fit: bool) -> Tokens:
    assert plan.inputs.trace is not None
    split, options = plan.inputs.trace.split, plan.options["evaluation"]
    return read_part(
        trace,
        seed=split.seed,
        fraction=split.fit_fraction,
        fit=fit,
        num_devices=plan.cluster.num_devices,
        samples_per_step=options["samples_per_step"],
        phases=options["phases"],
    )


def _layouts(plan: Plan, fit: Tokens) -> dict[str, Layout]:
    """The placement of every contender, by "name/dispatch model"; baselines are made again from the fitted tokens."""
    assert plan.evaluation is not None
    assert plan.decisions.placement is not None
    decision, num_experts = plan.decisions.placement, plan.model.num_experts
    slots_D = np.array(_widths(plan))
    loads_LE = np.array([np.bincount(row[row < num_experts], minlength=num_experts) for row in _by_layer(fit.ids)])
    baselines = {
        "contiguous": contiguous.solve(plan.model.num_layers, num_experts, plan.cluster, slots=slots_D).placement,
        "eplb": eplb.solve(loads_LE, plan.cluster, slots=slots_D).placement,
    }
    layouts = {}
    for contender in plan.evaluation.fit.contenders:
        made = baselines.get(contender.name)
        rows = decision.physical_to_logical if made is None else made.physical_to_logical.tolist()
        layouts[f"{contender.name}/{contender.dispatch_model}"] = Layout(
            coherent=contender.dispatch_model == "coherent",
            nearest=(decision if made is None else made).replica_rule == "nearest",
            holders=_holders(rows, _widths(plan), num_experts),
            num_devices=plan.cluster.num_devices,
            devices_per_node=plan.cluster.devices_per_node,
        )
    return layouts


def _by_layer(ids_TLK: NDArray[np.uint16]) -> list[NDArray[np.uint16]]:
    return [ids_TLK[:, layer].ravel() for layer in range(ids_TLK.shape[1])]


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
