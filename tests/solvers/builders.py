"""Oracles and inputs that the solver tests share."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeplan.profilers.cluster import Cluster
from moeplan.solvers.exflow.programme import Programme
from moeplan.solvers.placement import Placement

Array = NDArray[Any]
TWO_NODES = 8.0 - np.array([[0, 1, 8, 8], [1, 0, 8, 8], [8, 8, 0, 1], [8, 8, 1, 0]])
DEGREES = np.arange(1, 4001.0)


def deals(slots: list[int], num_experts: int) -> list[tuple[int, ...]]:
    """Every way to give each expert a home within the slots."""
    homes = itertools.product(range(len(slots)), repeat=num_experts)
    return [home for home in homes if all(home.count(d) <= slots[d] for d in range(len(slots)))]


def brute_force(transitions: Array, slots: list[int], near: Array) -> float:
    """The best value of any layout: every deal of every layer, layer by layer (Viterbi)."""
    homes = np.array(deals(slots, transitions.shape[1]))
    value = np.zeros(len(homes))
    for weight in transitions:
        step = np.array([[(weight * near[a[:, None], b]).sum() for b in homes] for a in homes])
        value = (value[:, None] + step).max(axis=0)
    return float(value.max())


def skewed(seed: int | np.random.Generator, num_layers: int = 4, num_experts: int = 8, alpha: float = 0.2) -> Array:
    """Counted transitions of which every expert has few that it takes often."""
    rng = np.random.default_rng(seed)
    return rng.poisson(rng.dirichlet(np.full(num_experts, alpha), (num_layers - 1, num_experts)) * 200)


def programme_of(weights: Array, slots: list[int], near: Array | None = None, group: int | None = None) -> Programme:
    """The placement of as many experts in every layer; devices all alike unless told otherwise."""
    near = np.eye(len(slots)) if near is None else near
    sizes = (weights.shape[1],) * (len(weights) + 1)
    return Programme(list(weights.astype(float)), sizes, np.array(slots), near, group or len(slots))


def homes(placement: Placement) -> Array:
    """The device of every expert `[L, E]`, one slot each."""
    return placement.device_of_slot[np.argsort(placement.physical_to_logical, axis=1)]


def naive_loads(counts: Array, experts: Array, home: Array, cluster: Cluster) -> tuple[float, ...]:
    """Copies between nodes and inside, the busiest port of each, and a device's between nodes, copy by copy."""
    group = cluster.devices_per_node
    inter, intra, devices = Counter[tuple[str, int]](), Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for (sample, expert), copies in np.ndenumerate(counts):
        here, there = int(home[sample]), int(experts[expert])
        if here // group != there // group:
            inter.update({("home", here // group): copies, ("expert", there // group): copies})
            devices.update({("home", here): copies, ("expert", there): copies})
        elif here != there:
            intra.update({("home", here): copies, ("expert", there): copies})
    sums = [sum(n for (end, _), n in ports.items() if end == "home") for ports in (inter, intra)]
    return (*map(float, sums), *(float(max(ports.values(), default=0)) for ports in (inter, intra, devices)))


def pass_seconds(layer: Mapping[str, float], n_d: Any, n_e: Any, factor: float, full_duplex: bool = False) -> Array:
    """t(r) of a pipelined pass, r = 1 .. 4000, from the seconds of its chunks, `[..., 4000]`."""
    t_d = layer["a_a"] + layer["b_a"] * np.asarray(n_d)[..., None] / DEGREES
    t_e = factor * (layer["a_e"] + layer["b_e"] * np.asarray(n_e)[..., None] / DEGREES)
    if full_duplex:
        return 2 * t_d + t_e + (DEGREES - 1) * np.maximum(t_d, t_e)
    return np.maximum(2 * DEGREES * t_d, 2 * t_d + DEGREES * t_e)


def simulated(
    dispatch_s: Sequence[float], experts_s: Sequence[float], combine_s: Sequence[float], full_duplex: bool
) -> float:
    """Seconds until every queue is empty: tasks start in the order of their queue once what they wait for is done."""
    chunks = range(len(dispatch_s))
    seconds = {("d", i): dispatch_s[i] for i in chunks} | {("e", i): experts_s[i] for i in chunks}
    seconds |= {("c", i): combine_s[i] for i in chunks}
    sends, returns = [("d", i) for i in chunks], [("c", i) for i in chunks]
    queues = [[("e", i) for i in chunks], *([sends, returns] if full_duplex else [sends + returns])]
    waits_for = {("e", i): ("d", i) for i in chunks} | {("c", i): ("e", i) for i in chunks}
    now = 0.0
    done: set[tuple[str, int]] = set()
    running: dict[int, tuple[float, tuple[str, int]]] = {}
    while any(queues) or running:
        for number, queue in enumerate(queues):
            if queue and number not in running and waits_for.get(queue[0]) in {None, *done}:
                task = queue.pop(0)
                running[number] = (now + seconds[task], task)
        now = min(end for end, _ in running.values())
        for number in [number for number, (end, _) in running.items() if end == now]:
            done.add(running.pop(number)[1])
    return now
