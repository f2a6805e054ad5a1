"""Recheck of a netmoe plan: its predictor, the cost of its homes and the least possible cost, and the methods tried.

Legend: I samples, or those of a step; L MoE layers; E experts; D devices; X exchanges; C link classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....errors import CertificationError
from ....runtime.decisions import SamplePolicyDecision
from ....runtime.migrating.predictor import Predictor, read_predictor
from ....runtime.plan import Plan
from ....solvers.cost import link_cost
from ....solvers.netmoe import METHODS, Traffic, port_bound
from ....solvers.netmoe.bottleneck import Channels
from ....traces.count_form import CountTable, CountTrace
from ...certify.census import Census, take_census
from ...certify.naive import NaiveReplay, devices_of, holders_of
from ...evaluate.evaluate import evaluate, verdict
from ...evaluate.homes import Rehoming
from ...evaluate.journey import Contender, Journey
from ...evaluate.metrics import EXCHANGE
from ...evaluate.price import SOURCES
from ...evaluate.traffic import SampleTraffic
from ...options import parsed
from ...task import Task
from ..check import Again, Check, Told
from .policy import SamplePolicyOptions
from .predictor import fit_predictor
from .strategy import PLAN, TRIED

__all__ = ["recheck"]

CLOSE = 1e-4  # relative to the largest: float32
Numbers = NDArray[np.float64]


def recheck(plan: Plan, again: Again | None) -> Iterator[Check | Told]:
    """As `Strategy.recheck`."""
    options = parsed(SamplePolicyOptions, dict(plan.options.get("sample_policy", {})), "sample_policy")
    decision = plan.decisions.sample_policy
    assert decision is not None
    _check_structure(plan, decision, options)
    yield Told("sample policy", checked=True)
    if again is None or again.evaluated is None:
        return
    task, evaluated = again.task, again.evaluated
    if (options.copies == "pairs") != isinstance(task.source, CountTrace):
        raise CertificationError(f"copies are {options.copies}; expected pairs of a trace of counts alone")
    traffic, census = _counted(task)
    predictor = None
    if decision.predictor is not None:
        predictor = _predictor(read_predictor(again.folder / decision.predictor.file), plan, traffic, census, task)
        yield Told("predictor", checked=True)
    device_LM = evaluated.homes[PLAN][0].device
    yield from _outcome(plan, decision, _Seen(traffic, census, predictor), device_LM)
    blind, least = _locality(plan, traffic.copies, census)
    yield Check("blind copies", options.blind_copies, blind)
    yield Check("least copies", options.least_copies, least)
    yield Told("samples, split and locality", checked=True)
    assert plan.verdict is not None
    if plan.verdict.metric in evaluated.judged[PLAN].value and options.over_dealt is not None:
        metric = task.strategy.judged_on(task.scene, "migrating")
        over = verdict(evaluated, metric, against="dealt/standard").gain
        for name in ("value", "low", "high"):
            yield Check(f"gain over dealt {name}", getattr(options.over_dealt, name), getattr(over, name))
    else:
        yield Told("the gain over samples dealt by length", checked=False)
    yield from _tried(options, task, predictor)
    if options.asked:
        yield Told("that the method was asked for", checked=False)
    if decision.method == "bottleneck":
        yield Told("that the swaps of bottleneck stop where they should", checked=False)


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


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """Traffic of every sample under the plan's placement: copies and pairs `[I, L, D]`, pairs with experts `[I, L, E]`,
    and how often fitted tokens go from an expert to a device `[L-1, E, D]` (None for counts).
    """

    copies: NDArray[np.int64]
    pairs: NDArray[np.int64]
    experts: NDArray[np.int64]
    linked: NDArray[np.int64] | None


def _counted(task: Task) -> tuple[_Sent, Census]:
    scene, model, size = task.scene, task.model, task.request.cluster.num_devices
    census = take_census(scene, task.request.fit_fraction, task.request.step_samples)
    holders, shape = holders_of(Journey("migrating", task.placement)), (len(census.tokens), model.num_layers)
    copies, pairs = (np.zeros((*shape, size), np.int64) for _ in range(2))
    experts = np.zeros((*shape, model.num_experts), np.int64)
    linked = np.zeros((shape[1] - 1, model.num_experts, size), np.int64)
    fitted_I = np.isin(np.arange(shape[0]), census.rosters[0].members)
    for batch, unit_R, place_R in census.rows(scene):
        if isinstance(batch, CountTable):
            np.add.at(experts, (place_R, batch.layer), batch.counts)
            continue
        turn_R, nowhere_R = unit_R + batch.position.astype(np.int64), np.full(len(place_R), -1)
        for layer in range(shape[1]):
            ids_RK = batch.ids[:, layer]
            device_RK = devices_of(ids_RK, holders[layer], "even", nowhere_R, turn_R, 1)
            row, choice = np.nonzero(device_RK >= 0)
            np.add.at(experts[:, layer], (place_R[row], ids_RK[row, choice]), 1)
            np.add.at(pairs[:, layer], (place_R[row], device_RK[row, choice]), 1)
            visited_RD = np.zeros((len(place_R), size), bool)
            visited_RD[row, device_RK[row, choice]] = True
            row, device = np.nonzero(visited_RD)
            np.add.at(copies[:, layer], (place_R[row], device), 1)
            row, device = np.nonzero(visited_RD & fitted_I[place_R][:, None])
            for before_R in batch.ids[:, layer - 1].T if layer else ():
                known = before_R[row] < model.num_experts
                np.add.at(linked[layer - 1], (before_R[row[known]], device[known]), 1)
    if not isinstance(task.source, CountTrace):
        return _Sent(copies, pairs, experts, linked), census
    for layer, held in enumerate(holders):
        for expert, (only,) in enumerate(held):  # counts go with no replicas
            copies[:, layer, only] += experts[:, layer, expert]
    return _Sent(copies, copies, experts, None), census


def _predictor(contents: bytes, plan: Plan, sent: _Sent, census: Census, task: Task) -> Predictor:
    """The predictor in a file, refused where the fitted samples give another one."""
    model = plan.model
    shape = (model.num_layers - 1, model.num_experts, plan.cluster.num_devices)
    claimed = Predictor.from_bytes(contents, shape)
    fitted_I = np.isin(np.arange(len(census.tokens)), census.rosters[0].members)
    narrow = SampleTraffic(
        task.placement, sent.copies.astype(np.int32), sent.copies[..., :1].astype(np.int32),
        sent.pairs.astype(np.int32), sent.linked,
    )  # fmt: skip
    found = fit_predictor(sent.experts.astype(np.int32), narrow, fitted_I, model.top_k).per_pair
    off = np.abs(claimed.per_pair - found).max(initial=0.0) / max(float(np.abs(found).max(initial=0.0)), 1e-9)
    if off > CLOSE:
        raise CertificationError(
            f"predictor off by {off:.2g} from what the fitted samples give; it was fitted on others. Re-run solve"
        )
    return claimed


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """Traffic as a sample policy sees it: counted copies, and the predictor of the next layer's."""

    sent: _Sent
    census: Census
    predictor: Predictor | None

    def exchanges(self, layer: int, place: NDArray[np.int64]) -> list[Numbers]:
        """The copies of some samples in this layer's combine and, as seen, in the next layer's dispatch, `[I, D]`."""
        combine = self.sent.copies[place, layer].astype(np.float64)
        if self.predictor is None or layer + 1 == self.sent.copies.shape[1]:
            return [combine]
        following = self.predictor.copies(layer, self.sent.experts[place, layer])
        return [combine] if following is None else [combine, following]


def _outcome(
    plan: Plan, decision: SamplePolicyDecision, seen: _Seen, device_LM: NDArray[np.int64]
) -> Iterator[Check | Told]:
    """Recheck of the mean cost of a re-homing, and of the bound on any homes of whole steps."""
    channels = Channels.of(plan.cluster, plan.model.copy_bytes)
    busiest = METHODS[decision.method].goal == "bottleneck"
    roster, outcome, found = seen.census.rosters[0], plan.outcome["sample_policy"], []
    assert roster.step is not None
    for step in range(roster.num_steps):
        at = np.flatnonzero(roster.step == step)
        for layer in range(plan.model.num_layers):
            exchanges, home_I = seen.exchanges(layer, roster.members[at]), device_LM[layer + 1, at]
            room = -(-len(at) // plan.cluster.num_devices)
            if busiest:
                found.append((_busiest(exchanges, home_I, channels), _least_busiest(exchanges, room, channels)))
            else:
                price_ID = sum(exchanges) @ link_cost(plan.cluster)
                found.append((float(price_ID[np.arange(len(at)), home_I].sum()), _least(price_ID, room)))
    value, bound = np.mean(found, axis=0).tolist()
    yield Check("objective's name", outcome.objective.name, channels.name if busiest else "link_cost")
    yield Check("objective", outcome.objective.value, value)
    yield Check("bound", outcome.bound, value if value <= bound * (1 + 1e-9) else bound)
    yield Told("objective and bound", checked=True)


def _ports(channels: Channels) -> NDArray[np.bool_]:
    """Whether the way between two devices is of a link class, `[C, D, D]`."""
    node_D = np.arange(channels.cluster.num_devices) // channels.cluster.devices_per_node
    far_DD = node_D[:, None] != node_D
    return np.stack([~far_DD & ~np.eye(len(node_D), dtype=bool), far_DD])


def _busiest(exchanges: Sequence[Numbers], home_I: NDArray[np.int64], channels: Channels) -> float:
    """Seconds, or copies, of the busiest port in every exchange."""
    total, ports = 0.0, _ports(channels)
    for copies_ID in exchanges:
        between_DD = (home_I == np.arange(copies_ID.shape[1])[:, None]).astype(np.float64) @ copies_ID
        ends = [(between_DD * ports).sum(axis=axis).max(axis=1) for axis in (1, 2)]
        total += float((channels.alpha + channels.beta * np.max(ends, axis=0)).max())
    return total


def _least(cost_ID: Numbers, room: int) -> float:
    """The least cost of homes with so many samples a device: each in a place of its own (Kuhn-Munkres)."""
    from scipy.optimize import linear_sum_assignment

    cost_IP = np.repeat(cost_ID, room, axis=1)
    return float(cost_IP[linear_sum_assignment(cost_IP)].sum())


def _least_busiest(exchanges: Sequence[Numbers], room: int, channels: Channels) -> float:
    """Lower bound on the time of any homes, at the solver's port weights. Any weights prove a bound."""
    size, ports = exchanges[0].shape[1], _ports(channels)
    traffic = Traffic(exchanges[0], exchanges[1] if len(exchanges) > 1 else None)
    weights = np.maximum(port_bound.least_time(traffic, np.full(size, room), channels).weights, 0.0)
    weights = weights / weights.sum(axis=(1, 2, 3), keepdims=True)
    cost_ID = np.zeros_like(exchanges[0])
    for copies_ID, (sent_CD, received_CD) in zip(exchanges, weights.transpose(0, 2, 1, 3), strict=True):
        weight_CDD = sent_CD[:, :, None] + received_CD[:, None, :]
        cost_ID += copies_ID @ np.einsum("c,cde,cde->ed", channels.beta, ports, weight_CDD)
    return float((weights.sum(axis=(2, 3)) @ channels.alpha).sum()) + _least(cost_ID, room)


def _locality(plan: Plan, copies: NDArray[np.int64], census: Census) -> tuple[float, float]:
    """Blind and least copies a fitted step between nodes (on one node: devices), next layers known."""
    group = plan.cluster.devices_per_node if plan.cluster.num_nodes > 1 else 1
    near_ILM = np.add.reduceat(copies, np.arange(0, copies.shape[2], group), axis=2).astype(np.float64)
    roster, blind, least = census.rosters[0], 0.0, 0.0
    assert roster.step is not None
    for step in range(roster.num_steps):
        who = roster.members[roster.step == step]
        room = -(-len(who) // plan.cluster.num_devices) * group
        for layer in range(plan.model.num_layers):
            near_IM = near_ILM[who, layer : layer + 2].sum(axis=1)
            cost_IM = near_IM.sum(axis=1)[:, None] - near_IM
            blind += float(cost_IM.mean(axis=1).sum())
            price_M = cost_IM.mean(axis=0).max() - cost_IM.mean(axis=0)
            lower = [(cost_IM + p).min(axis=1).sum() - room * p.sum() for p in (0 * price_M, price_M)]
            least += max(float(max(lower)), 0.0)
    return blind / roster.num_steps, least / roster.num_steps


def _tried(options: SamplePolicyOptions, task: Task, predictor: Predictor | None) -> Iterator[Check | Told]:
    """The methods that were tried on the fitted steps, again; without what times them they stay unchecked."""
    if options.tried_s and task.costs is None:
        yield Told("seconds of the methods tried", checked=False)
    elif options.tried_s:
        journeys = [Journey("migrating", task.placement, homes=Rehoming(name, predictor)) for name in options.tried_s]
        rows = [Contender(name, one) for name, one in zip(options.tried_s, journeys, strict=True)]
        replay = NaiveReplay(task.request.fit_fraction, task.request.step_samples)
        for one in evaluate(task.scene, rows, replay=replay).evaluation.fit.contenders:
            seconds = sum(one.metrics[part].value for part in SOURCES if part in one.metrics)
            yield Check(f"tried {one.name}", options.tried_s[one.name], seconds)
        yield Told("methods tried", checked=True)
