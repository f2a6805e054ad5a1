"""Predictions, by moeplan's solvers, replay and cost model, of figures that others published.

Each takes what `benchmarks/truth.yaml` gives for a figure; a speed-up is a quotient of two of them. Draws have fixed
seeds.

Legend: T tokens; K experts per token; L MoE layers; E experts; D devices; C link classes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np

from moeplan.planner.evaluate.costs import WHOLE_SAMPLES, CostModel
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.description import on_cluster
from moeplan.profilers.presets import load_preset
from moeplan.profilers.profile import Profile
from moeplan.solvers import contiguous, eplb, netmoe
from moeplan.solvers.balance import device_loads
from moeplan.solvers.netmoe.bottleneck import Channels
from moeplan.solvers.pipemoe import optimal_degrees
from moeplan.solvers.pipemoe.seconds import layer_seconds
from moeplan.solvers.placement import Placement
from moeplan.solvers.ports import port_copies, remote_visits
from moeplan.solvers.replicas import ReplicaTable
from moeplan.solvers.seconds import attention_seconds, exchange_seconds, expert_seconds, gather_seconds, slowest
from moeplan.traces.model import Attention, Latent, ModelSpec

from ...pipemoe_presets import PRESETS, table_iv
from ...routing import carried_on, expert_devices, markov, sample_counts
from ..exflow_paper.kept import (
    ELEMENT_BYTES,
    HIDDEN,
    NODE,
    NUM_LAYERS,
    SEEDS,
    Kept,
    exchange_s,
    in_order,
    nodes_of,
    placed,
)

Array = np.ndarray
Given = Mapping[str, Any]
LAYERS = 4  # drawn, for all
STEPS = 10  # of samples drawn
BACKWARD = 2.0  # times the forward computation
FP32_BYTES, ID_BYTES, MIB = 4, 8, 2**20
SMALL = 1e-30  # above 0


def chunks(*, gpus: int, degree: int) -> float:
    """How many times as fast PipeMoE's own degrees are as one degree for all, mean over the layers of Table IV."""
    known, layers = PRESETS[f"rtx2080ti-{gpus}"], list(table_iv())
    n_d, n_e = (np.array([work(one) for one in layers]) for work in (_bytes, _macs))
    lines: dict[str, Any] = {"a_a": known.a_a, "b_a": known.b_a, "a_e": known.a_e, "b_e": known.b_e}
    best_s = optimal_degrees(**lines, n_d=n_d, n_e=n_e, backward=BACKWARD).joint_s
    chunk_s, computed_s = known.a_a + known.b_a * n_d / degree, known.a_e + known.b_e * n_e / degree
    fixed_s = sum(layer_seconds(np.array(degree), chunk_s, factor * computed_s, chunk_s) for factor in (1, BACKWARD))
    return float((fixed_s / best_s).mean())


def homes(*, nodes: int, figure: str, hidden: int, links: Sequence[str], samples: int = 4) -> float:
    """A figure of NetMoE's homes of samples, mean over steps drawn."""
    drawn = (_homes(np.random.default_rng(seed), nodes, hidden, links, samples) for seed in range(STEPS))
    return fmean(one[figure] for one in drawn)


def stays(*, gpus: int, figure: str) -> float:
    """The share of transitions that ExFlow's placement keeps on a GPU, or that of crossing ones which it saves."""
    stay = fmean(Kept.of(one, placed(one, Cluster(1, gpus))).device for one in _chains())
    base = fmean(Kept.of(one, in_order(one, gpus)).device for one in _chains())
    return {"stay": stay, "saved": 1 - (1 - stay) / (1 - base)}[figure]


def stays_on_node(*, nodes: Sequence[int]) -> float:
    """How many times as many transitions stay on a node as with experts in order, mean over numbers of nodes."""
    ratios = []
    for size in nodes:
        ours = fmean(Kept.of(one, placed(one, nodes_of(NODE * size))).node for one in _chains())
        ratios.append(ours / fmean(Kept.of(one, in_order(one, NODE * size)).node for one in _chains()))
    return fmean(ratios)


def exflow_step(*, experts: int, gpus: int, tokens: int, context: int, preset: str, coherent: bool) -> float:
    """Seconds of a decode step: two exchanges a layer with experts in order, or ExFlow's one and a gather of ids."""
    cluster, weights = nodes_of(gpus), markov(np.random.default_rng(0), NUM_LAYERS, experts)
    spec = _spec(
        experts=experts, top_k=1, hidden=HIDDEN, ffn=4 * HIDDEN, element_bytes=ELEMENT_BYTES, kv=2 * HIDDEN, heads=16
    )
    costs = _costs(load_preset(preset), spec, queries=1.0)
    held = np.full((1, NUM_LAYERS, gpus), tokens)
    computed_s = _sum(attention_seconds(held, held * (2 * context + 1), costs.attention))
    computed_s += _sum(expert_seconds(held, np.full(gpus, experts // gpus), costs.experts))
    each = NUM_LAYERS / len(weights)  # transitions lead to all layers but the first, whose exchange is as theirs
    if not coherent:
        return computed_s + each * 2 * exchange_s(np.ones_like(weights), in_order(weights, gpus), tokens)
    gather = _costs(None, spec, cluster=cluster).gather
    gathered = gather_seconds(held[:, :1], ID_BYTES, cluster, gather)
    return computed_s + each * exchange_s(weights, placed(weights, cluster), tokens) + _sum(slowest(gathered))


def hottest(*, loads: Sequence[float], devices: int, slots: int, method: str) -> float:
    """The busiest device's load under EPLB."""
    found = eplb.solve([loads], Cluster(1, devices), slots=slots, method=method)  # type: ignore[arg-type]
    return float(device_loads(np.array([loads], np.float64), found.placement).max())


def exchange(*, cluster: str, links: Sequence[str], tokens: int, top_k: int, experts: int, row_bytes: int) -> float:
    """Seconds of an exchange under even routing, a row for each expert that a token chose, to experts in order."""
    place = Cluster.parse(cluster, links)
    ids = _chosen(np.random.default_rng(0), np.ones(experts), tokens * place.num_devices, top_k)
    home = np.repeat(np.arange(place.num_devices), tokens)
    devices = ids * place.num_devices // experts
    copies = _ports(home != devices.T, devices, home, place)
    return _sum(_exchanged(copies[:, None], row_bytes, _linked(place, row_bytes)))


def busiest(*, cluster: str, links: Sequence[str], row_bytes: int, rows: float) -> float:
    """Seconds of an exchange whose busiest port carries so many rows."""
    curves = _linked(Cluster.parse(cluster, links), row_bytes)
    return _sum(_exchanged(np.full((1, 1, len(curves), 2, 1), rows), row_bytes, curves))


def experts(*, preset: str, groups: int, rows: int, hidden: int, ffn: int, element_bytes: int) -> float:
    """Seconds of `groups` experts on one GPU, of so many rows each."""
    spec = _spec(experts=groups, top_k=1, hidden=hidden, ffn=ffn, element_bytes=element_bytes)
    pairs = np.full((1, 1, 1), groups * rows)
    return _sum(expert_seconds(pairs, np.array([groups]), _costs(load_preset(preset), spec).experts))


def repeats(*, model: Given, cluster: str, tokens: int, alpha: float) -> float:
    """Rows of an exchange that sends one for each expert, over those of one for each device."""
    step = _Step(model, Cluster.parse(cluster), tokens, alpha)
    visits = [(step.home != devices.T, remote_visits(devices, step.home)) for devices in step.devices("linear")]
    return float(sum(each.sum() for each, _ in visits) / sum(once.sum() for _, once in visits))


def crossing(*, model: Given, cluster: str, tokens: int, alpha: float, place: str) -> float:
    """The share of token-expert pairs that leave their node."""
    step = _Step(model, Cluster.parse(cluster), tokens, alpha)
    node_D = np.arange(step.cluster.num_devices) // step.cluster.devices_per_node
    return fmean(float((node_D[devices] != node_D[step.home][:, None]).mean()) for devices in step.devices(place))


def step(
    *,
    model: Given,
    preset: str,
    cluster: str,
    links: Sequence[str],
    tokens: int,
    context: int,
    decode: bool,
    alpha: float,
    place: str,
) -> float:
    """Seconds of attention, dispatch, experts and combine in all layers."""
    profile = on_cluster(load_preset(preset), cluster, links)
    drawn = _Step(model, profile.cluster, tokens, alpha)
    costs = _costs(profile, drawn.spec, queries=1.0 if decode else WHOLE_SAMPLES)
    return drawn.seconds(place, costs, context, decode=decode)


class _Step:
    """Tokens of a step, as many on each device, with experts drawn by loads of a power law."""

    def __init__(self, model: Given, cluster: Cluster, tokens: int, alpha: float) -> None:
        self.spec, self.cluster, self.tokens = _spec(**model), cluster, tokens
        rng, self.home = np.random.default_rng(0), np.repeat(np.arange(cluster.num_devices), tokens)
        self.loads_LE = _power_law(rng, (LAYERS, self.spec.num_experts), alpha, 0.8 * len(self.home))
        self.groups = self.spec.num_expert_groups
        limits = self.groups, self.spec.top_k_groups
        self.ids = [_chosen(rng, load_E, len(self.home), self.spec.top_k, *limits) for load_E in self.loads_LE]

    def placement(self, kind: str) -> tuple[Placement, str]:
        """`KIND[/SLOTS[/RULE]]`: linear, round_robin, eplb (published), groups (published, by nodes) or ours."""
        name, slots, rule = (*kind.split("/"), "", "")[:3]
        size, num_experts = int(slots or self.spec.num_experts // self.cluster.num_devices), self.spec.num_experts
        if name == "linear":
            return contiguous.solve(LAYERS, num_experts, self.cluster, slots=size).placement, rule or "even"
        if name == "round_robin":
            ranks = range(self.cluster.num_devices)
            held = [[[*range(rank, num_experts, len(ranks))] for rank in ranks]] * LAYERS
            return Placement.from_sets(held, num_experts), rule or "even"
        method, groups = "refined" if name == "ours" else "published", self.groups if name == "groups" else None
        found = eplb.solve(self.loads_LE, self.cluster, slots=size, num_groups=groups, method=method)  # type: ignore[arg-type]
        return found.placement, rule or "even"

    def devices(self, kind: str) -> list[Array]:
        """The device of every choice, `[T, K]`, layer by layer."""
        placement, rule = self.placement(kind)
        tables = [ReplicaTable.of(placement, at, self.cluster.devices_per_node, rule) for at in range(LAYERS)]  # type: ignore[arg-type]
        turn = np.arange(len(self.home))
        return [table.choose(ids, self.home, turn) for table, ids in zip(tables, self.ids, strict=True)]

    def seconds(self, kind: str, costs: Any, context: int, *, decode: bool) -> float:
        """Attention, dispatch, experts and combine of all layers."""
        devices, size = self.devices(kind), self.cluster.num_devices
        copies = [_ports(remote_visits(one, self.home), one, self.home, self.cluster) for one in devices]
        pairs = np.array([[np.bincount(one.ravel(), minlength=size) for one in devices]])
        held = np.full((1, LAYERS, size), self.tokens)
        moved = _exchanged(np.stack(copies, axis=1), float(self.spec.copy_bytes or 0), costs.exchange)
        parts = [
            attention_seconds(held, held * (2 * context + 1 if decode else context), costs.attention),
            expert_seconds(pairs, self.placement(kind)[0].slots, costs.experts),
        ]
        return 2 * _sum(moved) + sum(map(_sum, parts))


@cache
def _chains() -> list[Array]:
    return [markov(np.random.default_rng(seed), NUM_LAYERS, 64) for seed in range(SEEDS)]


def _homes(rng: np.random.Generator, nodes: int, hidden: int, links: Sequence[str], samples: int) -> dict[str, float]:
    cluster = Cluster.parse(f"{nodes}x8", links)
    counts, experts_E = sample_counts(rng, cluster, samples), expert_devices(cluster)
    _, after = carried_on(rng, counts)
    traffic = netmoe.traffic_of(counts, experts_E, cluster)
    stay = np.arange(len(counts)) // samples
    found = netmoe.solve(counts, experts_E, cluster, bounded=False)
    volumes = netmoe.volumes(traffic.gather, stay, cluster)
    both = netmoe.traffic_of(counts, experts_E, cluster, next_counts=after)
    better = netmoe.solve(counts, experts_E, cluster, next_counts=after, bounded=False).device_of_sample
    row_mib, channels = hidden * FP32_BYTES / MIB, Channels.of(cluster, hidden * FP32_BYTES)
    return {
        "inter": volumes.inter * row_mib,
        "intra": volumes.intra * row_mib,
        "inter with NetMoE": found.gather.inter * row_mib,
        "intra with NetMoE": found.gather.intra * row_mib,
        "inter saved": 1 - found.gather.inter / volumes.inter,
        "moved between nodes": float((found.device_of_sample // 8 != stay // 8).mean()),
        "moved": float((found.device_of_sample != stay).mean()),
        "scatter": channels.total(traffic, stay),
        "times": channels.total(both, stay) / channels.total(both, better),
    }


def _bytes(layer: Any) -> float:
    return float(layer.dispatched_bytes())


def _macs(layer: Any) -> float:
    return float(layer.multiply_adds())


def _power_law(rng: np.random.Generator, shape: tuple[int, int], alpha: float, largest: float) -> Array:
    """Loads whose density falls as x^-alpha between 1 and `largest`, by its inverse distribution."""
    power = 1 - alpha
    return np.asarray((1 + rng.random(shape) * (largest**power - 1)) ** (1 / power))


def _chosen(
    rng: np.random.Generator, loads: Array, tokens: int, top_k: int, groups: int | None = None, top: int | None = None
) -> Array:
    """Distinct experts of tokens `[T, K]`, drawn by loads, of the `top` groups whose best two draws are best."""
    score = np.log(loads).astype(np.float32) - np.log(
        SMALL + rng.standard_exponential((tokens, len(loads)), np.float32)
    )
    if groups and top:
        of_groups = score.reshape(tokens, groups, -1)
        best = np.partition(of_groups, -2, axis=2)[:, :, -2:].sum(axis=2)
        of_groups[best < np.partition(best, -top, axis=1)[:, [-top]]] = -np.inf
    return np.argpartition(-score, top_k - 1, axis=1)[:, :top_k]


def _ports(visits: Array, devices: Array, home: Array, cluster: Cluster) -> Array:
    return port_copies(visits, devices, home, np.zeros(len(home), np.int64), num_steps=1, cluster=cluster)


def _exchanged(copies: Array, row_bytes: float, curves: Any) -> Any:
    return slowest(exchange_seconds(copies, row_bytes, curves))


def _linked(cluster: Cluster, row_bytes: int) -> Any:
    """The curves of a cluster that is described, not measured."""
    return _costs(None, _spec(experts=2, top_k=1, hidden=row_bytes, ffn=1, element_bytes=1), cluster=cluster).exchange


def _costs(
    profile: Profile | None, spec: ModelSpec, *, queries: float = WHOLE_SAMPLES, cluster: Cluster | None = None
) -> Any:
    place = cluster or (profile.cluster if profile else None)
    assert place is not None
    return CostModel.of(profile, place, spec, samples=True, queries=queries)


def _spec(
    *, experts: int, top_k: int, hidden: int, ffn: int, element_bytes: int, kv: int | None = None,
    heads: int | None = None, kv_heads: int | None = None, groups: int | None = None, top_groups: int | None = None,
    kv_rank: int | None = None, q_rank: int | None = None, head: int = 0, rope: int = 0, value: int = 0,
) -> ModelSpec:  # fmt: skip
    latent = None
    if kv_rank is not None:
        latent = Latent(kv_rank=kv_rank, q_rank=q_rank, head_size=head, rope_size=rope, value_size=value)
    return ModelSpec(
        name="published", layer_ids=tuple(range(LAYERS)), num_experts=experts, top_k=top_k, hidden_size=hidden,
        ffn_size=ffn, dtype_bytes=element_bytes, num_expert_groups=groups, top_k_groups=top_groups,
        attention=Attention(kv_size=kv, num_heads=heads, num_kv_heads=kv_heads or heads, latent=latent),
    )  # fmt: skip


def _sum(prediction: Any) -> float:
    return float(np.sum(prediction.seconds))


PREDICTORS: dict[str, Callable[..., float]] = {
    one.__name__: one
    for one in (
        chunks, homes, stays, stays_on_node, exflow_step, hottest, exchange, busiest, experts, repeats, crossing, step,
    )
}  # fmt: skip
