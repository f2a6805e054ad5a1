"""Recheck of a netmoe plan: its predictor, the cost of its homes and the least possible cost, and the methods tried.

Legend: I samples, or those of a step; L MoE layers; E experts; D devices; X exchanges; C link classes.
"""

import itertools

import numpy as np
from scipy.optimize import linear_sum_assignment

from ....errors import CertificationError
from ....runtime.decisions import SamplePolicyDecision
from ....runtime.migrating.predictor import Predictor
from ....runtime.plan import Plan
from ....solvers.arrays import Bools, Floats, Ints
from ....solvers.cost import link_cost
from ....solvers.netmoe import METHODS, Traffic, port_bound
from ....solvers.netmoe.bottleneck import Channels
from ....traces.count_form import CountTrace
from ...certify.certificate import Certificate
from ...certify.recounted import Recounted
from ...evaluate.evaluate import verdict
from ...evaluate.metrics import EXCHANGE
from ...options import SamplePolicyOptions
from ..strategy import Again
from .policy import PLAN, TRIED, fitted_predictor, locality, tried

CLOSE = 1e-4  # relative to the largest: float32


def recheck(plan: Plan, again: Again | None, certificate: Certificate) -> None:
    """Recheck a plan as `Strategy.recheck` says."""
    options = SamplePolicyOptions.of(plan)
    decision = plan.decisions.sample_policy
    assert decision is not None
    _check_structure(plan, decision, options)
    certificate.checked("sample policy")
    if again is None or again.evaluated is None:
        return
    task, evaluated = again.task, again.evaluated
    if (options.copies == "pairs") != isinstance(task.source, CountTrace):
        raise CertificationError(f"copies are {options.copies}; expected pairs of a trace of counts alone")
    predictor = None
    if decision.predictor is not None:
        fitted = fitted_predictor(task, task.placement).per_pair
        predictor = Predictor.from_bytes(decision.predictor.read(again.folder), fitted.shape)
        off = np.abs(predictor.per_pair - fitted).max(initial=0.0) / max(float(np.abs(fitted).max(initial=0.0)), 1e-9)
        if off > CLOSE:
            raise CertificationError(
                f"predictor off by {off:.2g} from what the fitted samples give; it was fitted on others. Re-run solve"
            )
        certificate.checked("predictor")
    _check_outcome(plan, task, predictor, evaluated.homes[PLAN][0].device, certificate)
    index = locality(task)
    certificate.agree("blind copies", options.blind_copies, index.blind)
    certificate.agree("least copies", options.least_copies, index.least)
    certificate.checked("samples, split and locality")
    assert plan.verdict is not None
    if plan.verdict.metric in evaluated.judged[PLAN].value and options.over_dealt is not None:
        metric = task.strategy.judged_on(task.scene, "migrating")
        over = verdict(evaluated, metric, against="dealt/standard").gain
        for name in ("value", "low", "high"):
            certificate.agree(f"gain over dealt {name}", getattr(options.over_dealt, name), getattr(over, name))
    else:
        certificate.unchecked.append("the gain over samples dealt by length")
    if options.tried_s and task.scene.costs is None:
        certificate.unchecked.append("seconds of the methods tried")
    elif options.tried_s:
        for name, seconds in tried(task, predictor).items():
            certificate.agree(f"tried {name}", options.tried_s[name], seconds)
        certificate.checked("methods tried")
    if options.asked:
        certificate.unchecked.append("that the method was asked for")
    if decision.method == "bottleneck":
        certificate.unchecked.append("that bottleneck swapped until no swap helps")


def _check_structure(plan: Plan, decision: SamplePolicyDecision, options: SamplePolicyOptions) -> None:
    """Refuse a decision, options and an outcome that do not hang together."""
    if decision.method not in METHODS or decision.layers != tuple(range(plan.model.num_layers)):
        raise CertificationError(
            f"sample_policy by {decision.method!r:.20} after {len(decision.layers)} of {plan.model.num_layers} layers;"
            f" expected {' or '.join(METHODS)}, after every layer"
        )
    if (decision.predictor is None) != (decision.method == "paper"):
        raise CertificationError(f"sample_policy by {decision.method} with the wrong predictor: only paper has none")
    outcome = plan.outcome.get("sample_policy")
    if outcome is None or plan.evaluation is None or plan.verdict is None:
        raise CertificationError("a sample policy without its outcome, evaluation or verdict; re-run moeplan solve")
    busiest = METHODS[decision.method].goal == "bottleneck"
    names, kind = ({"exchange_s", "busiest_cost"}, "weighted ports") if busiest else ({"link_cost"}, "transportation")
    if outcome.objective.name not in names or outcome.objective.sense != "min" or outcome.bound_kind != kind:
        raise CertificationError(
            f"objective {outcome.objective.sense} {outcome.objective.name}, bound of {decision.method}:"
            f" {outcome.bound_kind}; expected min {sorted(names)}, {kind}"
        )
    tried, timed = options.tried_s, EXCHANGE in plan.evaluation.fit.contenders[0].metrics
    expected = {*TRIED} if timed and not options.asked else set()
    if {*tried} != expected or (tried and tried.get(decision.method, np.inf) > min(tried.values())):
        wanted = f"the fastest of {', '.join(TRIED)}" if expected else "no methods tried"
        raise CertificationError(f"{decision.method} of {dict(tried)} s; expected {wanted}: re-run moeplan solve")
    if not (tried or options.asked) and decision.method != "sum":
        raise CertificationError(f"{decision.method}, not asked for and untimed; expected sum: re-run moeplan solve")
    if options.over_dealt is None:
        raise CertificationError("options.sample_policy: no over_dealt; re-run moeplan solve")
    experts, devices = plan.model.num_experts, plan.cluster.num_devices
    slots = experts if plan.placement is None else plan.placement.num_slots
    if options.copies == "pairs" and (experts % devices or slots != experts):
        raise CertificationError(
            f"counts with replicas: {experts} experts on the {devices} devices of {plan.cluster}; expected devices that"
            " divide the experts, and one slot an expert"
        )


def _check_outcome(
    plan: Plan, task: Recounted, predictor: Predictor | None, device_LI: Ints, certificate: Certificate
) -> None:
    """Recheck of the mean cost of a re-homing, and of the bound on any homes of whole steps."""
    channels, outcome = Channels.of(plan.cluster, plan.model.copy_bytes), plan.outcome["sample_policy"]
    busiest = outcome.bound_kind == "weighted ports"
    cohort, samples, reached = task.scene.cohorts[0], task.scene.samples, list[tuple[float, float]]()
    assert samples is not None
    copies, experts = samples.under(task.placement).copies, samples.experts
    assert experts is not None
    for at, layer in itertools.product(cohort.steps(), range(plan.model.num_layers)):
        place, home_I, room = cohort.unit_ids[at], device_LI[layer + 1, at], -(-len(at) // copies.shape[2])
        following = None if predictor is None else predictor.copies(layer, experts[place, layer])
        traffic = Traffic(copies[place, layer].astype(np.float64), following)
        if busiest:
            reached.append((_busiest(traffic, home_I, channels), _least_busiest(traffic, room, channels)))
        else:
            price_ID = np.sum(traffic.exchanges, axis=0) @ link_cost(plan.cluster)
            reached.append((float(price_ID[np.arange(len(at)), home_I].sum()), _least(price_ID, room)))
    value, bound = np.mean(reached, axis=0).tolist()
    certificate.agree("objective's name", outcome.objective.name, channels.name if busiest else "link_cost")
    certificate.agree("objective", outcome.objective.value, value)
    certificate.agree("bound", outcome.bound, value if value <= bound * (1 + 1e-9) else bound)
    certificate.checked("objective and bound")


def _ports(channels: Channels) -> Bools:
    """Ways between two devices by link class, `[C, D, D]`."""
    node_D = np.arange(channels.cluster.num_devices) // channels.cluster.devices_per_node
    far_DD = node_D[:, None] != node_D
    return np.stack([~far_DD & ~np.eye(len(node_D), dtype=bool), far_DD])


def _busiest(traffic: Traffic, home_I: Ints, channels: Channels) -> float:
    """Seconds, or copies, of the busiest port in every exchange."""
    total, ports = 0.0, _ports(channels)
    for copies_ID in traffic.exchanges:
        between_DD = (home_I == np.arange(copies_ID.shape[1])[:, None]).astype(np.float64) @ copies_ID
        ends = [(between_DD * ports).sum(axis=axis).max(axis=1) for axis in (1, 2)]
        total += float((channels.alpha + channels.beta * np.max(ends, axis=0)).max())
    return total


def _least(cost_ID: Floats, room: int) -> float:
    """The least cost of homes with so many samples per device: each in a place of its own (Kuhn-Munkres)."""
    cost_IP = np.repeat(cost_ID, room, axis=1)
    return float(cost_IP[linear_sum_assignment(cost_IP)].sum())


def _least_busiest(traffic: Traffic, room: int, channels: Channels) -> float:
    """Lower bound on the time of any homes, at the solver's port weights. Any weights prove a bound."""
    room_D, cost_ID = np.full(traffic.gather.shape[1], room), np.zeros_like(traffic.gather)
    weights = np.maximum(port_bound.least_time(traffic, room_D, channels).weights, 0.0)
    weights = weights / weights.sum(axis=(1, 2, 3), keepdims=True)
    for copies_ID, (sent_CD, received_CD) in zip(traffic.exchanges, weights.transpose(0, 2, 1, 3), strict=True):
        weight_CDD = sent_CD[:, :, None] + received_CD[:, None, :]
        cost_ID += copies_ID @ np.einsum("c,cde,cde->ed", channels.beta, _ports(channels), weight_CDD)
    return float((weights.sum(axis=(2, 3)) @ channels.alpha).sum()) + _least(cost_ID, room)
