"""Recheck of a luffy plan: its law and predictor, the seconds of its homes and the least possible, and its rivals.

Legend: I samples of a step; D devices.
"""

import numpy as np

from ....errors import CertificationError
from ....runtime.plan import Plan
from ....solvers.arrays import Floats, Ints
from ....solvers.luffy import Attention, Law
from ....solvers.luffy.bound import Case, least_seconds
from ....solvers.netmoe.bottleneck import Channels
from ...certify.certificate import Certificate
from ..netmoe.recheck import Naive, busiest_port, check_fit, check_outcome, check_over, least, of_policy, weighted_ports
from ..strategy import Recheck
from .law import law_for


def recheck(plan: Plan, again: Recheck | None, certificate: Certificate) -> None:
    """Recheck a plan as `Strategy.recheck` says."""
    decision, options = of_policy(plan)
    law, outcome = decision.attention, plan.outcome["sample_policy"]
    if law is None:
        raise CertificationError("a policy of luffy without an attention law; expected one, or a policy of netmoe")
    if (outcome.objective.name, outcome.objective.sense, outcome.bound_kind) != ("layer_s", "min", "linear programme"):
        raise CertificationError(
            f"objective {outcome.objective.sense} {outcome.objective.name}, bound {outcome.bound_kind}; expected min"
            " layer_s, linear programme"
        )
    if options.over_dealt is None or options.over_netmoe is None:
        raise CertificationError("options.sample_policy: no over_dealt or over_netmoe; re-run moeplan solve")
    certificate.checked("sample policy")
    if again is None or again.evaluated is None:
        return
    predictor = check_fit(plan, again, certificate)
    if again.task.scene.costs is None:
        certificate.unchecked.append("the attention law")
    else:
        fitted = law_for(again.task)
        for name in ("start_s", "call_s", "token_s", "square_s"):
            certificate.agree(f"attention {name}", getattr(law, name), getattr(fitted, name))
        certificate.checked("attention law")
    channels, samples = Channels.of(plan.cluster, plan.model.copy_bytes), again.task.scene.samples
    assert samples is not None

    def of_homes(one: Naive) -> tuple[float, float]:
        tokens_I, contexts_I = samples.index.unit_tokens[one.place], samples.index.contexts[one.place]
        attention = Attention(law, tokens_I, contexts_I, one.follows)
        value = busiest_port(one.traffic, one.home, channels) + _busiest_device(attention, one.home)
        return value, _bound(one, attention, channels, value)

    check_outcome(plan, again, predictor, of_homes, "layer_s", certificate)
    check_over(plan, again, certificate)
    if decision.method == "joint":
        certificate.unchecked.append("that joint moved and swapped until nothing gains")


def _busiest_device(attention: Attention, home_I: Ints) -> float:
    """Seconds of attention on the busiest device, sample by sample."""
    law, busiest = attention.law, 0.0
    if not attention.follows:
        return busiest
    for device in set(home_I.tolist()):
        here = np.flatnonzero(home_I == device)
        costs = [_cost(law, int(attention.tokens[i]), int(attention.contexts[i])) for i in here]
        calls = 1 if law.batches == "padded" else len({int(attention.tokens[i]) for i in here})
        spent = len(here) * max(costs) if law.batches == "padded" else sum(costs)
        busiest = max(busiest, law.start_s + law.call_s * calls + spent)
    return busiest


def _cost(law: Law, tokens: int, contexts: int) -> float:
    """Seconds of a sample without starts and calls, in whole units."""
    return round((law.token_s * tokens + law.square_s * contexts) * 2**40) / 2**40


def _bound(one: Naive, attention: Attention, channels: Channels, value: float) -> float:
    """Lower bound on the time of any homes, at the solver's weights of ports and devices. Any weights prove a bound."""
    law, size = attention.law, one.traffic.gather.shape[1]
    room = one.room if law.numbers == "equal" else len(one.home)
    cases = least_seconds(one.traffic, attention, np.full(size, room), channels, value=value).cases
    if [case.home for case in cases] not in ([None], [*range(size)]):
        raise CertificationError("a bound by cases; expected one for each home of the longest sample")
    return min(_of_case(case, one, attention, channels, room) for case in cases)


def _of_case(case: Case, one: Naive, attention: Attention, channels: Channels, room: int) -> float:
    """Lower bound on the time of homes with the longest sample at one of them, or anywhere."""
    law, size = attention.law, one.traffic.gather.shape[1]
    weights = np.maximum(case.port_weights, 0.0)
    weights = weights / np.maximum(weights.sum(axis=(1, 2, 3), keepdims=True), 1.0)
    device_D = np.maximum(case.device_weights, 0.0)
    device_D = device_D / max(float(device_D.sum()), 1.0)
    start, cost_ID = weighted_ports(one.traffic, weights, channels)
    if not attention.follows:
        return start + least(cost_ID, room)
    costs_I = np.array([_cost(law, *map(int, pair)) for pair in zip(attention.tokens, attention.contexts, strict=True)])
    alone = (_padded if law.batches == "padded" else _packed)(costs_I, size, room)
    start += law.start_s + law.call_s + (1 - float(device_D.sum())) * alone
    for sample, cost in enumerate(costs_I.tolist()):
        for device in range(size):
            beside = device == case.home and law.batches == "padded"
            cost_ID[sample, device] += device_D[device] * (costs_I.max() if beside else cost)
    if case.home is not None:
        elsewhere = (1 + len(costs_I)) * cost_ID.max()  # more than any homes
        cost_ID[costs_I.argmax(), np.arange(size) != case.home] = elsewhere
    return start + least(cost_ID, room)


def _packed(costs_I: Floats, size: int, room: int) -> float:
    """Cost that some device holds at least: several of the longest samples, and what the others have no room for."""
    rising, fewest, most = sorted(costs_I.tolist()), len(costs_I) - (size - 1) * room, 0.0
    for several in range(1, (len(rising) - 1) // size + 2):
        longest = rising[len(rising) - (several - 1) * size - 1 :]  # by pigeonhole, that many of these meet
        most = max(most, sum(longest[:several]) + sum(rising[: max(fewest - several, 0)]))
    return most


def _padded(costs_I: Floats, size: int, room: int) -> float:
    """The least that the largest batch takes, samples times its largest cost, by halving an interval around it."""
    falling, low, high = sorted(costs_I.tolist(), reverse=True), 0.0, float(costs_I.max() * len(costs_I))
    for _ in range(60):
        middle, left = (low + high) / 2, falling
        for _ in range(size):
            left = left[min(int(middle / left[0]) if left[0] else room, room) :] if left else left
        low, high = (middle, high) if left else (low, middle)
    return low
