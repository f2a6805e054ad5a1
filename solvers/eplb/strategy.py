"""EPLB: replicas for the busiest experts, packed evenly (DeepSeek's published algorithm, and refined).

Legend: B steps; L MoE layers; E experts per layer; P slots per layer; D devices, S slots of each; N nodes; Q groups.
"""

import dataclasses
import time
from collections.abc import Collection, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ...workers import Workers
from ..arrays import Floats, Ints, checked_counts
from ..outcome import ROUNDING, Objective, Outcome, PlacementResult
from ..placement import BY_STEP, Groups, Placement, ReplicaRule, spread
from .layers import Layers, compile_refinement, whole_layers
from .rows import live_slots, pinned

Method = Literal["refined", "published", "robust"]


def solve(
    loads: ArrayLike,
    cluster: Cluster,
    *,
    slots: int | Sequence[int] | NDArray[np.integer] | None = None,
    num_groups: int | None = None,
    method: Method = "refined",
    groups: Groups = "split",
    dead: Collection[int] = (),
    pins: Collection[tuple[int, int]] = (),
    quantile: float | None = None,
    replica_rule: ReplicaRule = ReplicaRule.EVEN,
    workers: Workers | None = None,
) -> PlacementResult:
    """The placement of EPLB, repaired where it would put an expert twice on a device, and refined.

    Parameters
    ----------
    loads
        `[L, E]`, at least 0; or of steps `[B, L, E]`.
    slots
        S, one number for all devices or one a device; by default the fewest equal ones that hold all experts.
    num_groups
        Q, groups of consecutive experts from which a token chooses few. Where they divide by several nodes of equal
        slots that can hold them, as pins allow, the form is hierarchical: no group is split between nodes. Else, and
        for None, it is global.
    method
        "published", or "refined" from there: no layer's busiest device holds more. "robust" is refined for steps and
        for means of steps resampled from them, which holds better on others where steps are few.
    groups
        "whole": every group in a contiguous block of slots (`keeps_groups_whole`), without replicas.
    dead
        Devices that hold nothing.
    pins
        Pairs (expert, device): in every layer, that device holds a replica.
    quantile
        Of steps, in place of their mean.
    replica_rule
        Rule by which tokens choose replicas. nearest: every node holds every expert, so that no token leaves its node,
        and all nodes are placed alike, for sources that send alike. quota, lp: each step is split so that its busiest
        device holds as little as can be (`step_split`), and the placement is refined for that.
    workers
        Workers that refine the layers; None: threads. The placement is the same whichever do.

    Returns
    -------
    PlacementResult
        The objective is `balance`, the mean over layers of max/mean device load, every expert's load shared evenly by
        its replicas; of steps `step_balance`, the mean over steps too, or their quantile, `step_balance_p95`.
        `repaired` counts the choices of the published algorithm that were changed.

    Raises
    ------
    ValueError
        Loads of wrong shape, negative or not finite; an unknown method; no groups; a quantile that is none; a quantile,
        or the robust method, without steps.
    UsageError
        Slots that cannot hold the experts or what is pinned; pins of no expert or device; groups that cannot be whole;
        nearest with dead devices, pins, whole groups or unequal slots; a quantile of steps that are split exactly.

    Notes
    -----
    (0) In the hierarchical form groups, heaviest first, go to the least loaded node with room for one more, each node
    taking as many (refined: as all ways tried are best); what follows is done inside each node alone. (1), (2) as
    `published` says. (3) The busiest device of a layer is relieved by swaps and changes of replicas, with kicks
    (`kernel`), of one step longer. (4) Of several steps, changes at random are kept that lower the objective
    (`step_kernel`; where steps are split exactly `split_kernel`); robust: the mean over steps and resampled means.

    Bound: (1) without (0) minimises the largest replica load, so no placement has max/mean below
    max(1, largest replica load / mean); refined with groups kept, below that of the best way to deal them.
    """
    loads_BLE = checked_counts(loads, "loads", (None,) * (3 if np.ndim(loads) == 3 else 2))
    _check(method, groups, num_groups, loads_BLE, quantile)
    slots_D = live_slots(loads_BLE.shape[-1], cluster.num_devices, slots, dead)
    if replica_rule is ReplicaRule.NEAREST:
        if dead or pins or groups == "whole":
            raise UsageError("replica rule nearest with dead devices, pins or whole groups; expected all nodes alike")
        return _on_every_node(loads, cluster, slots_D, method, quantile, workers)
    if replica_rule in BY_STEP and quantile is not None:
        raise UsageError(f"a quantile of steps with the replica rule {replica_rule}; expected their mean")
    pinned_DE = pinned(pins, loads_BLE.shape[-1], slots_D)
    if groups == "whole":
        layers, size = whole_layers(loads_BLE, slots_D, pinned_DE, num_groups, quantile)
    else:
        layers, size = Layers.of(loads_BLE, slots_D, pinned_DE, cluster.num_nodes, num_groups, quantile), 1
    layers = dataclasses.replace(layers, rule=replica_rule)
    compiled_s = 0.0 if method == "published" else compile_refinement(loads_BLE.shape, replica_rule)
    started = time.perf_counter()
    placement, repaired = layers.published()
    deal = None if method == "published" else layers.dealt()
    if method != "published":
        placement = (layers.robust if method == "robust" else layers.refined)(placement, deal, workers)
    outcome = _outcome(layers, placement, layers.bound(deal), started)
    return PlacementResult(spread(placement, size), dataclasses.replace(outcome, compiled_s=compiled_s), repaired)


def _on_every_node(
    loads: ArrayLike, cluster: Cluster, slots: Ints, method: Method, quantile: float | None, workers: Workers | None
) -> PlacementResult:
    """The placement of one node with all experts in its slots, of `[D]`, on every node."""
    num_nodes, group, num_experts = cluster.num_nodes, cluster.devices_per_node, np.shape(loads)[-1]
    if len({*slots.tolist()}) > 1:
        raise UsageError(f"replica rule nearest: {slots.sum()} slots on {len(slots)} devices; expected as many on each")
    if (held := slots[0] * group) < num_experts:
        raise UsageError(
            f"replica rule nearest: {held} slots per node for {num_experts} experts; expected at least"
            f" {-(-num_experts // group)} per device (--slots)"
        )
    one = solve(loads, Cluster(1, group), slots=int(slots[0]), method=method, quantile=quantile, workers=workers)
    alone = one.placement
    table_LP = np.tile(alone.physical_to_logical, num_nodes)
    everywhere = Placement(table_LP, np.tile(alone.slots, num_nodes), num_experts, ReplicaRule.NEAREST)
    return dataclasses.replace(one, placement=everywhere)


def _outcome(layers: Layers, placement: Placement, bound: float, started: float) -> Outcome:
    value = layers.value(placement)
    name = "balance" if layers.steps is None else "step_balance"
    if layers.quantile is not None:
        name += f"_p{100 * layers.quantile:g}"
    return Outcome.of(
        objective=Objective(name, value, "min"),
        bound=bound,
        bound_kind=layers.bound_kind,
        proven=value <= bound * (1 + ROUNDING),
        started=started,
        backend="moeplan" if layers.groups is None else "moeplan hierarchical",
    )


def _check(method: str, groups: str, num_groups: int | None, loads: Floats, quantile: float | None) -> None:
    if method not in get_args(Method) or groups not in get_args(Groups):
        raise ValueError(
            f"method {method!r}, groups {groups!r}; expected {', '.join(get_args(Method))}; split or whole"
        )
    if method == "robust" and loads.ndim != 3:
        raise ValueError(f"method robust of loads of {loads.ndim} axes; expected loads of steps")
    if num_groups is not None and num_groups < 1:
        raise ValueError(f"{num_groups} expert groups; expected one at least, or None")
    if quantile is not None and (loads.ndim != 3 or not 0 <= quantile <= 1):
        raise ValueError(f"quantile {quantile} of loads of {loads.ndim} axes; expected 0 to 1, and loads of steps")
