"""The NetMoE strategy: counts of samples in, their homes and a proven bound out.

Legend: I samples; D devices; N nodes; G devices per node; E experts.

The objective "sum" is `link_cost`: copies that leave their device, those between nodes counted `cost.inter_ratio`
times. Two stages, each an exact transportation problem, make its first part, the copies between nodes, as few as any
homes can, then the second given the first; the whole is bounded by one transportation over all devices, which is exact
(`stages=1` takes its homes). The objective "bottleneck" is the time of Eq. 5 as the busiest ports of devices set it
(`bottleneck.Channels`), by which steps are predicted, reached by swaps after the stages, a local optimum; `port_bound`
bounds it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...profilers.cluster import Cluster
from ..arrays import Ints
from ..assignment import Method, backend_of, balanced_assignment
from ..cost import inter_ratio
from ..outcome import ROUNDING, Objective, Outcome
from .bottleneck import Channels, refine
from .port_bound import least_time
from .traffic import Traffic, Volumes, traffic_of, volumes


def two_stages(units: Ints, capacity: Ints, devices_per_node: int, method: Method = "transport") -> Ints:
    """The device of every sample `[I]`: as little as possible between nodes, then between the devices of each.

    Parameters
    ----------
    units
        `Traffic.units`, `[I, D]`.
    capacity
        The most samples per device takes, `[D]`.
    method
        Of `assignment.balanced_assignment`.

    Notes
    -----
    With t[i, d] the copies of sample i with device d, Eq. 8 and 10 (each for one exchange or the sum of both) are

        c[i, n]  = sum_{d not on n} t[i, d]              over the nodes, at most sum_{d on n} capacity[d] samples    (1)
        c'[i, d] = sum_{e on the node of d} t[i, e] - t[i, d]    over the devices of its node, capacity[d] samples   (2)

    Each stage is optimal, the second given the first; the sum of both is not, which `one_stage` is.
    """
    num_devices = units.shape[1]
    on_node_IN = units.reshape(len(units), -1, devices_per_node).sum(axis=2)
    room_N = capacity.reshape(-1, devices_per_node).sum(axis=1)
    node_I = balanced_assignment(on_node_IN.sum(axis=1, keepdims=True) - on_node_IN, room_N, method)  # (1)
    device_I = node_I * devices_per_node
    if devices_per_node == 1:
        return device_I
    for first in range(0, num_devices, devices_per_node):
        here, there = np.flatnonzero(node_I == first // devices_per_node), slice(first, first + devices_per_node)
        near_IG = units[here, there]
        cost_IG = near_IG.sum(axis=1, keepdims=True) - near_IG
        device_I[here] += balanced_assignment(cost_IG, capacity[there], method)  # (2)
    return device_I


def one_stage(units: Ints, capacity: Ints, devices_per_node: int, ratio: float, method: Method = "transport") -> Ints:
    """The device of every sample `[I]` for the least c' + ratio c over both stages at once: exact too, D sinks.

    Parameters
    ----------
    ratio
        Cost of a copy between nodes, in copies inside a node.
    """
    on_node_IN = units.reshape(len(units), -1, devices_per_node).sum(axis=2)
    near_ID = np.repeat(on_node_IN, devices_per_node, axis=1)
    far_ID = units.sum(axis=1, keepdims=True) - near_ID
    return balanced_assignment(ratio * far_ID + (near_ID - units), capacity, method)


@dataclass(frozen=True, slots=True, eq=False)
class NetMoeResult:
    """Homes of samples and how they came about."""

    device_of_sample: Ints  #: SmpDev, int64 `[I]`
    #: gather, scatter: what crosses then: this layer's combine, and the next layer's dispatch as predicted (None: not
    #: looked at)
    gather: Volumes
    scatter: Volumes | None
    outcome: Outcome


def solve(
    counts: ArrayLike,
    expert_to_device: ArrayLike,
    cluster: Cluster,
    *,
    next_counts: ArrayLike | None = None,
    next_expert_to_device: ArrayLike | None = None,
    capacity: int | Sequence[int] | NDArray[np.integer] | None = None,
    objective: Literal["sum", "bottleneck"] = "sum",
    stages: Literal[1, 2] = 2,
    method: Method = "transport",
    copy_bytes: float | None = None,
    bounded: bool = True,
) -> NetMoeResult:
    """The home of every sample that makes this layer's combine and the next layer's dispatch cheapest (Eq. 5-10).

    Parameters
    ----------
    counts, next_counts
        Copies of each sample to each expert of this layer and, as predicted, of the next, `[I, E]`.
    expert_to_device, next_expert_to_device
        Integers `[E]`, or with replicas the share of an expert's copies that each device serves, `[E, D]`; the next
        layer's is this layer's unless given.
    capacity
        The most samples per device takes, one number or `[D]`; by default ceil(I / D).
    objective, stages
        As the module says.
    method
        Of `assignment.balanced_assignment`; among equal optima each has its own.
    copy_bytes
        Of a copy, for "bottleneck" in seconds.
    bounded
        Whether to bound the objective, too, which takes longer than to find the homes.

    Raises
    ------
    ValueError
        Counts, maps or capacities of wrong shape or value; an unknown option.
    UsageError
        The devices together take fewer than I samples.
    """
    started = time.perf_counter()
    _check_options(objective, stages, copy_bytes)
    traffic = traffic_of(
        counts, expert_to_device, cluster, next_counts=next_counts, next_expert_to_device=next_expert_to_device
    )
    room_D = _room(capacity, len(traffic.gather), cluster.num_devices)
    found = _by_sum(traffic, room_D, cluster, stages, method, bounded=bounded and objective == "sum")
    if objective == "bottleneck":
        found = _by_ports(traffic, room_D, found.home, Channels.of(cluster, copy_bytes), bounded=bounded)
    gather, *scatter = (volumes(x, found.home, cluster) for x in traffic.exchanges)
    outcome = found.outcome(backend_of(method), started)
    return NetMoeResult(found.home, gather, scatter[0] if scatter else None, outcome)


@dataclass(frozen=True, slots=True, eq=False)
class _Reached:
    """Homes `[I]`, what they reach, and the bound."""

    home: Ints
    objective: Objective
    bound: float | None
    bound_kind: str

    def outcome(self, backend: str, started: float) -> Outcome:
        """The outcome of a solve that ends now."""
        return Outcome.of(
            objective=self.objective,
            bound=self.bound,
            bound_kind=None if self.bound is None else self.bound_kind,
            proven=self.bound is not None and self.objective.value <= self.bound * (1 + ROUNDING),
            started=started,
            backend=backend,
        )


def _by_sum(
    traffic: Traffic, room_D: Ints, cluster: Cluster, stages: int, method: Method, *, bounded: bool
) -> _Reached:
    """Homes of two stages, bounded by those of one; or the latter."""
    home_I = joint_I = two_stages(traffic.units, room_D, cluster.devices_per_node, method)
    if (stages == 1 or bounded) and 1 < cluster.num_nodes < cluster.num_devices:
        joint_I = one_stage(traffic.units, room_D, cluster.devices_per_node, inter_ratio(cluster), method)
        home_I = joint_I if stages == 1 else home_I
    goal = Objective("link_cost", _link_cost(traffic, home_I, cluster), "min")
    return _Reached(home_I, goal, _link_cost(traffic, joint_I, cluster) if bounded else None, "transportation")


def _by_ports(traffic: Traffic, room_D: Ints, start_I: Ints, channels: Channels, *, bounded: bool) -> _Reached:
    """Homes refined from others'."""
    home_I = refine(traffic, start_I, room_D, channels)
    goal = Objective(channels.name, channels.total(traffic, home_I), "min")
    bound = least_time(traffic, room_D, channels).seconds if bounded else None
    return _Reached(home_I, goal, bound, "weighted ports")


def _check_options(objective: str, stages: int, copy_bytes: float | None) -> None:
    if objective not in ("sum", "bottleneck") or stages not in (1, 2) or not (copy_bytes is None or copy_bytes > 0):
        raise ValueError(
            f"objective {objective!r}, {stages!r} stages, copies of {copy_bytes!r} bytes; expected sum or bottleneck,"
            " 1 or 2, more than 0"
        )


def _room(capacity: Any, num_samples: int, num_devices: int) -> Ints:
    """The most samples each device takes, `[D]`."""
    found = np.asarray(-(-num_samples // num_devices) if capacity is None else capacity)
    if found.dtype.kind not in "iu" or found.shape not in ((), (num_devices,)) or (found < 0).any():
        raise ValueError(f"capacity {capacity!r}; expected one non-negative integer or {num_devices}, one a device")
    return np.full(num_devices, np.minimum(found, num_samples), dtype=np.int64)


def _link_cost(traffic: Traffic, home_I: Ints, cluster: Cluster) -> float:
    crossing = [volumes(x, home_I, cluster) for x in traffic.exchanges]
    return sum(inter_ratio(cluster) * v.inter + v.intra for v in crossing)
