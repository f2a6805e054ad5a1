"""Placements whose expert groups stay whole: groups placed as if they were experts, then experts inside their group.

Legend: L MoE layers; E experts per layer; Q groups of g = E / Q; D devices; a block is the devices that a group fills.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ..arrays import Floats, Ints
from ..outcome import PlacementResult, Status
from ..placement import Placement, block_devices, spread
from .budget import Budget
from .problem import Problem

BLOCK_SHARE = 0.3  # of the budget, where groups fill several devices: for which block each is on
LEAST_S = 1e-3  # for a search whose time the ones before it took
Search = Callable[..., PlacementResult]


def place_whole(
    problem: Problem, num_groups: int, width: int, max_load: float | None, budget: Budget, search: Search
) -> tuple[Placement, Status]:
    """The best placement found of those that `keeps_groups_whole` is true of, and how the searches ended.

    Parameters
    ----------
    num_groups, width
        Those of `checked_groups`.
    search
        Finds a placement as `exflow.solve` does.

    Notes
    -----
    Where devices hold whole groups, this is the placement of Q experts with their summed weights, exactly. Else in two
    stages: which block each group is on, to keep the most in blocks (and on nodes, where blocks are inside nodes); then
    inside every block its experts, what enters or leaves it dropped, since that is the same whatever device of it. What
    stays in a block need not stay on a device: where experts in their own order keep more, they stay so.
    """
    slots_D, num_experts = problem.programme.slots, problem.loads.shape[1]
    weights, beside, load_LQ = _of_groups(problem, num_groups)
    if not width:
        size = num_experts // num_groups
        found = _within(search, budget)(
            weights, problem.goal.cluster, coactivation=beside, loads=load_LQ, max_load=max_load, slots=slots_D // size
        )
        return spread(found.placement, size), _ended(found.outcome.status)
    first = _within(search, budget.part(BLOCK_SHARE))
    blocks = first(weights, _of_blocks(problem.goal.cluster, width), coactivation=beside, slots=1)
    left = Budget(budget.left * (1 - BLOCK_SHARE), budget.remaining_s)
    placement, status = _inside(problem, blocks, width, left, search)
    row_E = np.arange(num_experts, dtype=np.int32)
    in_order = replace(placement, physical_to_logical=np.tile(row_E, (placement.num_layers, 1)))
    return max(placement, in_order, key=problem.value), status


def checked_groups(problem: Problem, num_groups: int | None, max_load: float | None) -> tuple[int, int]:
    """Number of groups, and of devices that each fills, 0 where devices hold whole ones.

    Raises
    ------
    UsageError
        Groups that cannot be whole, or a cap where they fill several devices.
    """
    if num_groups is None:
        raise UsageError("whole groups of a model without expert groups; expected one with them, or --groups split")
    width = block_devices(problem.loads.shape[1], num_groups, problem.programme.slots)
    if width and max_load is not None:
        raise UsageError(f"max load {max_load:g} for whole groups of {width} devices; expected none: leave it away")
    return num_groups, width


def _inside(
    problem: Problem, blocks: PlacementResult, width: int, budget: Budget, search: Search
) -> tuple[Placement, Status]:
    """The placement of experts inside the blocks that their groups are on."""
    group_LQ, statuses, tables = blocks.placement.physical_to_logical, [blocks.outcome.status], []
    num_groups, size = blocks.placement.num_slots, problem.loads.shape[1] // blocks.placement.num_slots
    cluster = _of_block(problem.goal.cluster, width)
    for block in range(num_groups):
        member_LE = group_LQ[:, block, None].astype(np.int64) * size + np.arange(size)
        if Status.INTERRUPTED in statuses:
            tables.append(member_LE)
            continue
        part = Budget(budget.left / num_groups, budget.remaining_s / (num_groups - block))
        inside = [w[np.ix_(*member_LE[cut : cut + 2])] for cut, w in enumerate(problem.weights)]
        beside = problem.terms.beside
        found = _within(search, part)(
            np.array(inside).reshape(-1, size, size),
            cluster,
            coactivation=None if beside is None else _among(beside, member_LE),
            loads=np.take_along_axis(problem.loads, member_LE, axis=1),
            slots=size // width,
        )
        statuses.append(found.outcome.status)
        tables.append(np.take_along_axis(member_LE, found.placement.physical_to_logical.astype(np.int64), axis=1))
    table_LP = np.concatenate(tables, axis=1).astype(np.int32)
    return Placement(table_LP, problem.programme.slots, problem.loads.shape[1]), _ended(*statuses)


def _within(search: Search, budget: Budget) -> Search:
    """A search of what a budget has left."""
    return partial(search, time_limit_s=max(budget.remaining_s, LEAST_S), work=budget.left)


def _ended(*statuses: Status) -> Status:
    """Status of searches that ended so; the best of whole groups is proven by no bound of all placements."""
    return next((s for s in (Status.INTERRUPTED, Status.TIME_LIMIT) if s in statuses), Status.FEASIBLE)


def _of_groups(problem: Problem, num_groups: int) -> tuple[Floats, Floats | None, Floats]:
    """The weights, pairs and loads of groups."""
    size, beside = problem.loads.shape[1] // num_groups, problem.terms.beside

    def summed(weights: Floats) -> Floats:
        return np.asarray(weights.reshape(-1, num_groups, size, num_groups, size).sum(axis=(2, 4)))

    load_LQ = problem.loads.reshape(-1, num_groups, size).sum(axis=2)
    return summed(problem.weights), None if beside is None else summed(beside), load_LQ


def _among(beside: Floats, member_LE: Ints) -> Floats:
    """The pairs among the members of every layer."""
    return np.array([weight[np.ix_(e, e)] for weight, e in zip(beside, member_LE, strict=True)])


def _of_blocks(cluster: Cluster, width: int) -> Cluster:
    """The cluster with blocks for devices; on one level of links where they are not inside nodes."""
    if cluster.devices_per_node % width:
        return Cluster(1, cluster.num_devices // width)
    links = {kind: replace(link, shared_by=1.0) for kind, link in cluster.links.items()}  # what matters is their ratio
    return Cluster(cluster.num_nodes, cluster.devices_per_node // width, links)


def _of_block(cluster: Cluster, width: int) -> Cluster:
    """The cluster of a block's devices: one node, or whole ones."""
    if width % cluster.devices_per_node:
        return Cluster(1, width)
    return Cluster(width // cluster.devices_per_node, cluster.devices_per_node, cluster.links)
