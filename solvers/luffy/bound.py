"""A lower bound on attention and exchanges over all homes of a step's samples.

Legend: I samples; D devices; C link classes, inside nodes (0) and between them (1); X exchanges.
"""

from dataclasses import dataclass

import numpy as np

from ..arrays import Floats, Ints
from ..assignment import balanced_assignment
from ..netmoe.bottleneck import Channels
from ..netmoe.port_bound import prices
from ..netmoe.traffic import Traffic
from .attention import Attention

MOST_CELLS = 2**23  # of the programme, samples x devices x ports; beyond, weights are equal


CLOSE = 0.03  # of a value: bounds that are nearer to it are not sought


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Lower bound of the seconds of homes with the longest sample at `home`, by weights of ports and devices."""

    seconds: float
    home: int | None  #: None: wherever it is
    #: port_weights, device_weights: `[X, C, 2, D]` and `[D]`, which prove it
    port_weights: Floats
    device_weights: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """Lower bound of the seconds of any homes: one case, or one for each home of the longest sample."""

    cases: tuple[Case, ...]

    @property
    def seconds(self) -> float:
        """The least of the cases."""
        return min(case.seconds for case in self.cases)


def least_seconds(
    traffic: Traffic, attention: Attention, places: Ints, channels: Channels, *, value: float = np.inf
) -> Bound:
    """The bound by linear programming, proven by its duals alone.

    Parameters
    ----------
    places
        The most samples each device takes, `[D]`.
    value
        Seconds of homes that are known; a bound close to them is enough.

    Notes
    -----
    Over shares x[i, d] >= 0 of whole samples,

        minimise  A + sum_x T_x      s.t.   sum_d x[i, d] = 1,      sum_i x[i, d] <= places[d],
                  A >= sum_i cost_id x[i, d],     A >= A_0,      T_x >= alpha_c + beta_c copies[x, c, end, d]

    with A_0 the least attention that any homes take on their own (`least_attention`). The start and the first call of
    some device come on top. Duals w >= 0 of the ports, which sum to 1 in each exchange, and v >= 0 of the devices,
    which sum to 1 with that of A_0, prove a bound on their own: at any such weights no homes take less than the
    cheapest ones at the prices that the weights set, one transportation. With v = 0 attention counts A_0, which proves
    more where there are no duals.

    The longest sample must be somewhere. Where the bound is not close, it is taken on each device in turn, whole, and
    the least of these bounds counts. Padded samples take no less than packed ones, beside the longest as much as that.
    """
    anywhere = Bound((_case(traffic, attention, places, channels, None),))
    if not attention.follows or anywhere.seconds >= (1 - CLOSE) * value:
        return anywhere
    each = Bound(tuple(_case(traffic, attention, places, channels, home) for home in range(len(places))))
    return max(anywhere, each, key=lambda bound: bound.seconds)


def _case(traffic: Traffic, attention: Attention, places: Ints, channels: Channels, home: int | None) -> Case:
    """The better bound of the duals, and of those of the ports alone."""
    port_weights, devices = _duals(traffic, attention, places, channels, home)
    cases = [
        Case(_proven(traffic, attention, places, channels, port_weights, weights, home), home, port_weights, weights)
        for weights in (devices, np.zeros_like(devices))
    ]
    return max(cases, key=lambda case: case.seconds)


def least_attention(attention: Attention, places: Ints) -> float:
    """Seconds that the busiest device takes at least, its start and first call left out.

    Notes
    -----
    Padded: the exact optimum. Packed: of the k D + 1 longest samples some device holds k + 1, for any k, and as many
    others as the places of the other devices leave to it.
    """
    if attention.law.batches == "padded":
        return padded_optimum(attention.cost, places)[0]
    falling_I, size, num_samples = -np.sort(-attention.cost), len(places), len(attention.cost)
    fewest = num_samples - int(places.sum() - places.min())
    return max(
        float(falling_I[k * size - k : k * size + 1].sum() + falling_I[num_samples - max(fewest - k - 1, 0) :].sum())
        for k in range(-(-num_samples // size))
    )


def _costs(attention: Attention, size: int, home: int | None) -> Floats:
    """Seconds of attention that each sample takes at least on each device, `[I, D]`."""
    cost_ID = np.repeat(attention.cost[:, None], size, axis=1)
    if home is not None and attention.law.batches == "padded":
        cost_ID[:, home] = attention.cost.max()
    return cost_ID


def _duals(
    traffic: Traffic, attention: Attention, places: Ints, channels: Channels, home: int | None
) -> tuple[Floats, Floats]:
    """Weights of ports `[X, C, 2, D]` and of devices `[D]`: the duals of the programme, whose columns are x by sample,
    then device, T_x and A.
    """
    from scipy.optimize import linprog
    from scipy.sparse import block_array, csr_array, eye_array, kron

    (num_samples, size), num_exchanges = traffic.gather.shape, len(traffic.exchanges)
    shape = (num_exchanges, 2, 2, size)
    equal = np.full(shape, 0.25 / size), np.full(size, 1 / size)  # prove a bound, too, a weaker one
    if num_exchanges * 4 * size * num_samples * size > MOST_CELLS:
        return equal
    cost_ID, alone = _costs(attention, size, home), least_attention(attention, places)
    most_ID = np.full((num_samples, size), np.inf)
    if home is not None:
        most_ID[attention.cost.argmax()] = np.arange(size) == home
    scale = max(channels.total(traffic, np.arange(num_samples) % size), float(cost_ID.sum()) / size**2, 1e-30)
    each, ports = csr_array(np.ones((1, num_samples))), csr_array(_port_rows(traffic, channels) / scale)
    on_device_DX = (cost_ID.T[:, :, None] / scale * np.eye(size)[:, None]).reshape(size, -1)
    longest, alpha_P = np.ones((ports.shape[0] // num_exchanges, 1)), np.repeat(channels.alpha, 2 * size)
    rows = [
        [ports, -kron(eye_array(num_exchanges), longest), None],
        [csr_array(on_device_DX), None, csr_array(-np.ones((size, 1)))],
        [kron(each, eye_array(size)), None, None],
    ]
    most = np.append(most_ID, np.full(num_exchanges + 1, np.inf))
    fewest = np.append(np.zeros(len(most) - 1), alone / scale)
    found = linprog(
        np.append(np.zeros(num_samples * size), np.ones(num_exchanges + 1)),
        A_ub=block_array(rows, format="csr"),
        b_ub=np.concatenate([np.tile(-alpha_P / scale, num_exchanges), np.zeros(size), places]),
        A_eq=block_array(
            [[kron(eye_array(num_samples), np.ones((1, size))), csr_array((num_samples, num_exchanges + 1))]]
        ),
        b_eq=np.ones(num_samples),
        bounds=np.stack([fewest, most], axis=1),
        method="highs",
    )
    if found.status != 0:
        return equal
    dual = np.maximum(-found.ineqlin.marginals, 0.0)
    port_weights, devices = dual[: ports.shape[0]].reshape(shape), dual[ports.shape[0] :][:size]
    port_weights = port_weights / np.maximum(port_weights.sum(axis=(1, 2, 3), keepdims=True), 1e-300)
    return port_weights, devices / max(devices.sum(), 1.0)


def _port_rows(traffic: Traffic, channels: Channels) -> Floats:
    """Seconds that each sample on each device adds to every port, `[P, I D]`, P by exchange, class, end and device."""
    size = channels.cluster.num_devices
    rows = []
    for copies_ID in traffic.exchanges:
        for beta, crosses_DD in zip(channels.beta, channels.crosses, strict=True):
            at_home_DID = np.einsum("ih,hd->hid", beta * copies_ID @ crosses_DD, np.eye(size))
            at_experts_DID = np.einsum("ie,he->eih", beta * copies_ID, crosses_DD)
            rows += [at_home_DID.reshape(size, -1), at_experts_DID.reshape(size, -1)]
    return np.concatenate(rows)


def _proven(
    traffic: Traffic,
    attention: Attention,
    places: Ints,
    channels: Channels,
    port_weights: Floats,
    device_weights: Floats,
    home: int | None,
) -> float:
    """The seconds of the cheapest homes at these weights."""
    cost_ID = (np.array(traffic.exchanges) @ prices(port_weights, channels)).sum(axis=0)
    cost_ID = cost_ID + _costs(attention, len(places), home) * device_weights
    value = float((channels.alpha @ port_weights.sum(axis=(2, 3)).T).sum()) + attention.start_s + attention.call_s
    value += (1 - float(device_weights.sum())) * least_attention(attention, places)
    if home is not None:
        longest = int(attention.cost.argmax())
        value, places = value + float(cost_ID[longest, home]), places - (np.arange(len(places)) == home)
        cost_ID = np.delete(cost_ID, longest, axis=0)
    if (places >= len(cost_ID)).all():
        return value + float(cost_ID.min(axis=1).sum())
    home_I = balanced_assignment(cost_ID, places)
    return value + float(cost_ID[np.arange(len(cost_ID)), home_I].sum())


def padded_optimum(cost: Floats, places: Ints) -> tuple[float, Ints]:
    """The least of the largest samples_d max cost_d over all devices, and the batch of each sample, `[I]`.

    Notes
    -----
    Among optima is one whose batches follow one another in the samples by falling cost: with the numbers of a batch
    kept, the k-th batch's largest cost can only fall by sorting. So a value v is reached where batches filled greedily
    from the largest cost c, each with floor(v / c) samples, are at most D; the least such v is one of k c_i. O(I^2).
    """
    order_I, devices = np.argsort(-cost, kind="stable"), len(places)
    falling_I, most = cost[order_I], int(places.max(initial=1))
    many = np.arange(1, min(len(cost), most) + 1)
    values = np.unique(np.outer(falling_I, many))

    def filled(value: float) -> Ints | None:
        """The batch of each sample, `[I]`, where none takes more than a value; None: there is no such."""
        batch_I, start = np.zeros(len(cost), np.int64), 0
        for batch in range(devices):
            if start == len(cost):
                break
            top = falling_I[start]
            takes = most if top == 0 else int(min(value * (1 + 1e-12) // top, most))
            if takes == 0:
                return None
            batch_I[order_I[start : start + takes]] = batch
            start = min(start + takes, len(cost))
        return batch_I if start == len(cost) else None

    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if filled(float(values[middle])) is None:
            low = middle + 1
        else:
            high = middle
    batch_I = filled(float(values[low]))
    assert batch_I is not None
    return float(values[low]), batch_I
