"""Training on an emulated cluster while the load drifts: today, replicas that stay, EPLB, FlexMoE, even loads.

Every step is a record of the drift, the next one 10 iterations later. A token asks one expert a layer. What experts
compute is waits; tokens, gradients, weights and moves of owners with their AdamW state are sent.

Legend: R steps; L layers; E experts; D devices; T tokens of a rank; S slots of a device.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from moeplan.planner.strategies.flexmoe.strategy import WINDOWS, filled
from moeplan.profilers.cluster import Cluster
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import PlacementDecision, RebalancingDecision
from moeplan.runtime.decisions.rebalancing import MOST_STEPS
from moeplan.runtime.plan import Plan
from moeplan.runtime.rebalancing import Schedule, tables_of
from moeplan.solvers import contiguous
from moeplan.solvers.flexmoe import Costs, EveryEplb, Policy, follow, initial
from moeplan.solvers.placement import Placement, ReplicaRule

from .model import BACKWARD, EmulatedModel, Sizes, train
from .network import linked
from .routing import Workload, plan_of
from .timing import Seconds

Array = np.ndarray
LAYERS, TOKENS, HIDDEN = 2, 128, 512
EXPERT = 4096  # parameters: an expert's gradient is a 16th of the tokens of a rank
PAIR_S = 2e-4
EPLB_EVERY, HORIZON = 10, 30  # steps
STATE_BYTES, MOVE_CALLS = 16, 4  # of a parameter that moves: weight, gradient, AdamW's two; small calls of a move
FITTED, START = 48, 8  # records before the training, on which policies are tried; the last, to place for
WARM = 4  # steps that are not timed, the last fitted ones
TODAY, STATIC, NEVER, EPLB, FLEXMOE, IDEAL = (
    "today",
    "static replicas",
    "static replicas, policy that never moves",
    f"EPLB every {EPLB_EVERY} records, matched",
    "flexmoe",
    "even loads",
)
KEPT = Policy(trigger=MOST_STEPS, every=0)  # never moves, and asks for nothing


@dataclass(frozen=True, slots=True)
class Drift:
    """A training whose load drifts.

    Parameters
    ----------
    pairs
        Of every step, those that warm up first, `[R, L, E, D]`.
    work
        The experts of every kind of token, and the kinds of every step, then of one of even loads, `[(R + 1) D, T]`.
    ways
        A plan each, and the tables that it replays.
    """

    name: str
    pairs: Array
    work: Workload
    sizes: Sizes
    ways: dict[str, tuple[Plan, Schedule | None]]


class Trained(NamedTuple):
    """Seconds of a way's steps, and the tables `[L, D, S]` and owners `[L, E]` that they ran under."""

    seconds: Seconds
    tables: list[Array]
    owners: list[Array]


def drift_of(name: str, cluster: Cluster, shares: Array, seed: int) -> Drift:
    """The training of which a rank's tokens ask for experts by shares `[FITTED + R, L, D, E]`."""
    rng, size = np.random.default_rng(seed), cluster.num_devices
    num_records, num_layers, _, num_experts = shares.shape
    even = np.resize(np.arange(num_experts), TOKENS)
    ids_RDTL = np.array(
        [
            [[rng.permutation(rng.choice(num_experts, TOKENS, p=share)) for share in record[:, d]] for d in range(size)]
            for record in shares
        ]
    ).transpose(0, 1, 3, 2)
    pairs = np.array([[np.bincount(ids.ravel(), minlength=num_experts) for ids in step] for step in _flat(ids_RDTL)])
    pairs = pairs.reshape(num_records, num_layers, size, num_experts).swapaxes(2, 3)
    steps = np.concatenate([ids_RDTL[FITTED - WARM :], np.broadcast_to(even[:, None], (1, size, TOKENS, num_layers))])
    kinds = np.arange(steps[..., 0].size).reshape(-1, TOKENS)
    work = Workload(steps.reshape(-1, num_layers, 1), kinds, num_experts)
    sizes = Sizes(num_experts=num_experts, hidden_size=HIDDEN, pair_s=PAIR_S, expert_size=EXPERT)
    return Drift(name, pairs[FITTED - WARM :], work, sizes, _ways(cluster, work, sizes, pairs))


def _flat(ids_RDTL: Array) -> Array:
    """Experts by step, then layer and rank, `[R, L D, T]`."""
    moved: Array = ids_RDTL.transpose(0, 3, 1, 2)
    return moved.reshape(len(moved), -1, moved.shape[3])


def _ways(cluster: Cluster, work: Workload, sizes: Sizes, pairs: Array) -> dict[str, tuple[Plan, Schedule | None]]:
    records, group = np.ascontiguousarray(pairs[:, :, None]), cluster.devices_per_node
    costs, slots = costs_of(cluster), work.num_experts // cluster.num_devices + 1
    start, policy = _start(records[FITTED - START : FITTED], slots, costs, group), _policy(records, slots, costs, group)
    run = follow(records[FITTED - WARM :], start, EveryEplb(EPLB_EVERY, matched=True), costs, group=group)
    schedule = {int((run.period == at).argmax()): table for at, table in enumerate(run.tables) if at}
    replicas = placement_by(start, work.num_experts)
    today = contiguous.solve(pairs.shape[1], work.num_experts, cluster).placement

    def rebalanced(policy: Policy) -> Plan:
        decision = RebalancingDecision(
            method="search",
            start=PlacementDecision.of(replicas),
            trigger=policy.trigger,
            horizon_steps=policy.horizon,
            record_steps=1,
            window=policy.window,
            recent=policy.recent,
            every=policy.every,
            evaluations=policy.evaluations,
            costs={name: float(one) for name, one in costs._asdict().items()},
        )
        return plan_of(cluster, work, sizes, None, rebalancing=decision)

    return {
        TODAY: (plan_of(cluster, work, sizes, today), None),
        STATIC: (plan_of(cluster, work, sizes, replicas), None),
        NEVER: (rebalanced(replace(KEPT, trigger=MOST_STEPS - 1)), None),
        EPLB: (rebalanced(policy), schedule),
        FLEXMOE: (rebalanced(policy), None),
        IDEAL: (plan_of(cluster, work, sizes, today), None),
    }


def _start(records: Array, slots: int, costs: Costs, group: int) -> Array:
    """Tables for these records, without an empty slot, `[L, D, S]`."""
    return filled(initial(records, slots, costs, group=group), records.sum(axis=(0, 2, 4)), group)


def _policy(records: Array, slots: int, costs: Costs, group: int) -> Policy:
    """The policy of fewest seconds on the fitted records, as `solve` chooses it."""
    start = _start(records[:START], slots, costs, group)
    tried = [*(Policy(horizon=HORIZON, window=window) for window in WINDOWS), KEPT]
    return min(tried, key=lambda one: follow(records[START:FITTED], start, one, costs, group=group).step_s)


def placement_by(tables: Array, num_experts: int) -> Placement:
    """The placement of tables `[L, D, S]` without an empty slot, each step split by its counts."""
    return Placement.from_sets(tables.tolist(), num_experts, ReplicaRule.QUOTA)


def costs_of(cluster: Cluster) -> Costs:
    """The rates by which the policy decides."""
    links = linked(cluster).links
    costs = Costs.of(
        parameters=EXPERT,
        hidden=HIDDEN,
        pair_s=(1 + BACKWARD) * PAIR_S,
        intra=links["intra"],
        inter=links["inter"],
        width=4,
        state_width=STATE_BYTES,
    )
    return costs._replace(moves_s=MOVE_CALLS * links["inter"].latency_s)


def run(
    cluster: Cluster, rank: int, given: list[Drift], report: Callable[[Any], None]
) -> dict[str, dict[str, Trained]]:
    """Every way's steps, in turn, forth and back; all ranks call it together."""
    found = {}
    for one in given:
        report(f"{cluster}: {one.name}")
        found[one.name] = _trained(cluster, rank, one)
    return found


def _trained(cluster: Cluster, rank: int, one: Drift) -> dict[str, Trained]:
    tokens = torch.as_tensor(one.work.tokens.reshape(-1, cluster.num_devices, TOKENS)[:, rank : rank + 1])
    loops, shared = dict[str, tuple[Any, torch.optim.Optimizer]](), None
    for way, (plan, schedule) in one.ways.items():
        model = EmulatedModel(one.work.ids, one.sizes)
        shared = model.embed.table if shared is None else shared
        model.embed.table = shared
        model.add_module("head", nn.Identity())
        spread = parallelize(model, plan, schedule=schedule)
        loops[way] = spread, torch.optim.AdamW(spread.parameters())
    taken = {way: Trained(Seconds(()), [], []) for way in loops}
    seconds = torch.zeros(len(one.pairs), len(loops), dtype=torch.float64)
    for step in range(len(one.pairs)):
        order = list(enumerate(loops.items()))
        for number, (way, (spread, optimizer)) in order[:: -1 if step % 2 else 1]:
            blocks = spread.blocks
            taken[way].owners.append(np.stack([block.placement.owner for block in blocks]))
            taken[way].tables.append(_tables(spread))
            mine = tokens[-1 if way == IDEAL else step]
            seconds[step, number] = _timed(spread, optimizer, mine)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    columns = zip(taken.items(), seconds[WARM:].T.tolist(), strict=True)
    return {way: one._replace(seconds=Seconds(tuple(column))) for (way, one), column in columns}


def _tables(spread: Any) -> Array:
    """The tables that a model runs under, `[L, D, S]`."""
    return (tables_of(spread.plan.placement) if spread.rebalancing is None else spread.rebalancing.tables).copy()


def _timed(spread: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    dist.barrier()
    started = time.perf_counter()
    train(spread, tokens)
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - started
