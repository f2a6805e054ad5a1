"""Recheck of a netmoe plan: its predictor, the cost of its homes and the least possible cost, and the methods tried.

Legend: I samples, or those of a step; L MoE layers; E experts; D devices; X exchanges; C link classes.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

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
from ....solvers.rehoming import fault
from ....traces.count_form import CountTrace
from ...certify.certificate import Certificate
from ...evaluate.metrics import EXCHANGE
from ..strategy import Recheck
from .options import PLAN, SamplePolicyOptions
from .policy import TRIED, fitted_predictor, locality, over, tried

CLOSE = 1e-4  # relative to the largest: float32


class Naive(NamedTuple):
    """A layer's re-homing of a step as the plan had it, counted anew."""

    traffic: Traffic
    home: Ints  #: `[I]`
    room: int  #: The share of a device, in samples
    place: Ints  #: The samples in the trace's index, `[I]`
    follows: bool  #: Whether attention follows the layer


def recheck(plan: Plan, again: Recheck | None, certificate: Certificate) -> None:
    """Recheck a plan as `Strategy.recheck` says."""
    decision, options = of_policy(plan)
    _check_structure(plan, decision, options)
    certificate.checked("sample policy")
    if again is None or again.evaluated is None:
        return
    task, predictor = again.task, check_fit(plan, again, certificate)
    channels, busiest = Channels.of(plan.cluster, plan.model.copy_bytes), _busiest_counts(plan)

    def of_homes(one: Naive) -> tuple[float, float]:
        if busiest:
            return busiest_port(one.traffic, one.home, channels), _least_busiest(one.traffic, one.room, channels)
        price_ID = np.sum(one.traffic.exchanges, axis=0) @ link_cost(plan.cluster)
        return float(price_ID[np.arange(len(one.home)), one.home].sum()), least(price_ID, one.room)

    check_outcome(plan, again, predictor, of_homes, channels.name if busiest else "link_cost", certificate)
    check_over(plan, again, certificate)
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


def of_policy(plan: Plan) -> tuple[SamplePolicyDecision, SamplePolicyOptions]:
    """The decision and its options; CertificationError where layers lack it, or what belongs beside it is missing."""
    decision, options = plan.decisions.sample_policy, SamplePolicyOptions.of(plan)
    assert decision is not None
    if wrong := fault(decision.method, decision.attention, predicts=decision.predictor is not None):
        raise CertificationError(wrong)
    if decision.layers != tuple(range(plan.model.num_layers)):
        raise CertificationError(
            f"{len(decision.layers)} of {plan.model.num_layers} layers re-home samples; expected that after every layer"
        )
    if "sample_policy" not in plan.outcome or plan.evaluation is None or plan.verdict is None:
        raise CertificationError("a sample policy without its outcome, evaluation or verdict; re-run moeplan solve")
    return decision, options


def check_fit(plan: Plan, again: Recheck, certificate: Certificate) -> Predictor | None:
    """The plan's predictor, which the fitted samples give, and the locality index."""
    task, (decision, options), predictor = again.task, of_policy(plan), None
    if (options.copies == "pairs") != isinstance(task.source, CountTrace):
        raise CertificationError(f"copies are {options.copies}; expected pairs of a trace of counts alone")
    if decision.predictor is not None:
        fitted = fitted_predictor(task, task.placement).per_pair
        predictor = Predictor.from_bytes(decision.predictor.read(again.folder), fitted.shape)
        off = np.abs(predictor.per_pair - fitted).max(initial=0.0) / max(float(np.abs(fitted).max(initial=0.0)), 1e-9)
        if off > CLOSE:
            raise CertificationError(
                f"predictor off by {off:.2g} from what the fitted samples give; it was fitted on others. Re-run solve"
            )
        certificate.checked("predictor")
    index = locality(task)
    certificate.agree("blind copies", options.blind_copies, index.blind)
    certificate.agree("least copies", options.least_copies, index.least)
    certificate.checked("samples, split and locality")
    return predictor


def check_over(plan: Plan, again: Recheck, certificate: Certificate) -> None:
    """The gains over simpler ways, where what judges them is known."""
    assert again.evaluated is not None
    assert plan.verdict is not None
    options, known = SamplePolicyOptions.of(plan), again.evaluated.judged[PLAN].value
    metric = again.task.strategy.judged_on(again.task.scene, "migrating")
    for name, gain in over(metric, again.evaluated).items():
        stored, words = getattr(options, name), f"gain {name.replace('_', ' ')}"
        if gain is None or stored is None or plan.verdict.metric not in known:
            certificate.unchecked.append(f"the {words}")
            continue
        for end in ("value", "low", "high"):
            certificate.agree(f"{words} {end}", getattr(stored, end), getattr(gain, end))


def _busiest_counts(plan: Plan) -> bool:
    """Check whether the busiest port is the plan's objective."""
    decision = plan.decisions.sample_policy
    return decision is not None and METHODS[decision.method].goal == "bottleneck"


def _check_structure(plan: Plan, decision: SamplePolicyDecision, options: SamplePolicyOptions) -> None:
    """Refuse a decision, options and an outcome that do not hang together."""
    assert plan.evaluation is not None
    outcome = plan.outcome["sample_policy"]
    if decision.attention is not None:
        raise CertificationError("a policy of netmoe with an attention law; expected one of luffy")
    busiest = _busiest_counts(plan)
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


def check_outcome(
    plan: Plan,
    again: Recheck,
    predictor: Predictor | None,
    of_homes: Callable[[Naive], tuple[float, float]],
    name: str,
    certificate: Certificate,
) -> None:
    """Recheck of the mean cost of a re-homing, and of the bound on any homes of whole steps, as `of_homes` has both."""
    outcome, task, evaluated = plan.outcome["sample_policy"], again.task, again.evaluated
    assert evaluated is not None
    device_LI = evaluated.homes[PLAN][0].device
    cohort, samples, reached = task.scene.cohorts[0], task.scene.samples, list[tuple[float, float]]()
    assert samples is not None
    copies, experts = samples.under(task.placement).copies, samples.experts
    assert experts is not None
    for at, layer in itertools.product(cohort.steps_by_home(), range(plan.model.num_layers)):
        place, room = cohort.unit_ids[at], -(-len(at) // copies.shape[2])
        following = None if predictor is None else predictor.copies(layer, experts[place, layer])
        traffic = Traffic(copies[place, layer].astype(np.float64), following)
        reached.append(
            of_homes(Naive(traffic, device_LI[layer + 1, at], room, place, layer + 1 < plan.model.num_layers))
        )
    value, bound = np.mean(reached, axis=0).tolist()
    certificate.agree("objective's name", outcome.objective.name, name)
    certificate.agree("objective", outcome.objective.value, value)
    certificate.agree("bound", outcome.bound, value if value <= bound * (1 + 1e-9) else bound)
    certificate.checked("objective and bound")


def _ports(channels: Channels) -> Bools:
    """Ways between two devices by link class, `[C, D, D]`."""
    node_D = np.arange(channels.cluster.num_devices) // channels.cluster.devices_per_node
    far_DD = node_D[:, None] != node_D
    return np.stack([~far_DD & ~np.eye(len(node_D), dtype=bool), far_DD])


def busiest_port(traffic: Traffic, home_I: Ints, channels: Channels) -> float:
    """Seconds, or copies, of the busiest port in every exchange."""
    total, ports = 0.0, _ports(channels)
    for copies_ID in traffic.exchanges:
        between_DD = (home_I == np.arange(copies_ID.shape[1])[:, None]).astype(np.float64) @ copies_ID
        ends = [(between_DD * ports).sum(axis=axis).max(axis=1) for axis in (1, 2)]
        total += float((channels.alpha + channels.beta * np.max(ends, axis=0)).max())
    return total


def least(cost_ID: Floats, room: int) -> float:
    """The least cost of homes with so many samples per device: each in a place of its own (Kuhn-Munkres)."""
    cost_IP = np.repeat(cost_ID, room, axis=1)
    return float(cost_IP[linear_sum_assignment(cost_IP)].sum())


def _least_busiest(traffic: Traffic, room: int, channels: Channels) -> float:
    """Lower bound on the time of any homes, at the solver's port weights. Any weights prove a bound."""
    room_D = np.full(traffic.gather.shape[1], room)
    weights = np.maximum(port_bound.least_time(traffic, room_D, channels).weights, 0.0)
    start, cost_ID = weighted_ports(traffic, weights / weights.sum(axis=(1, 2, 3), keepdims=True), channels)
    return start + least(cost_ID, room)


def weighted_ports(traffic: Traffic, weights: Floats, channels: Channels) -> tuple[float, Floats]:
    """Seconds to start and seconds of each sample on each device, at weights of the ports `[X, C, 2, D]`."""
    cost_ID = np.zeros_like(traffic.gather)
    for copies_ID, (sent_CD, received_CD) in zip(traffic.exchanges, weights.transpose(0, 2, 1, 3), strict=True):
        weight_CDD = sent_CD[:, :, None] + received_CD[:, None, :]
        cost_ID += copies_ID @ np.einsum("c,cde,cde->ed", channels.beta, _ports(channels), weight_CDD)
    return float((weights.sum(axis=(2, 3)) @ channels.alpha).sum()), cost_ID
