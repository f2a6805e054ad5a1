"""Random layers with replicas: a table, pairs and devices a node; and naive twins of what is compiled."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeplan.solvers.flexmoe import Costs

Array = NDArray[Any]
COSTS = Costs(
    pair_s=7e-8,
    copy_bytes=2048.0,
    intra_latency_s=1e-5,
    intra_s_per_byte=1 / 300e9,
    inter_latency_s=2e-5,
    inter_s_per_byte=1 / 45e9,
    gradient_bytes=1.6e5,
    intra_sum_s_per_byte=1 / 350e9,
    inter_sum_s_per_byte=1 / 45e9,
    moved_bytes=1.3e6,
    replicas_free=False,
)


@st.composite
def layers(draw: st.DrawFn, vectors: int = 2) -> tuple[Array, Array, int]:
    """The expert in every slot, -1 in empty ones, `[D, S]`; pairs `[B, E, D]`; devices a node."""
    group, num_nodes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_devices, width = group * num_nodes, draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, num_devices * width))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    table = np.full((num_devices, width), -1)
    table.flat[rng.permutation(table.size)[:num_experts]] = np.arange(num_experts)
    for d, s in np.argwhere(table < 0):
        e = rng.integers(num_experts)
        if rng.random() < 0.8 and e not in table[d]:
            table[d, s] = e
    pairs = rng.integers(0, draw(st.sampled_from([4, 1000])), (vectors, num_experts, num_devices))
    return table, pairs, group


def holders(table: Array, expert: int) -> list[int]:
    return [d for d, row in enumerate(table.tolist()) if expert in row]


def naive_over_steps(figures: list[float], quantile: float) -> float:
    """The least figure that so large a share of the others does not exceed, by counting; 0: the mean."""
    if not quantile:
        return sum(figures) / len(figures)
    others = len(figures) - 1
    return min(one for one in figures if sum(other <= one for other in figures) - 1 >= quantile * others - 1e-9)


def naive_sums(table: Array, num_experts: int, group: int) -> Array:
    """Every two holders of an expert send each other one part in n, twice."""
    rows = np.zeros((2, len(table)))
    for e in range(num_experts):
        at = holders(table, e)
        for d in at:
            for other in at:
                if other != d:
                    rows[int(d // group != other // group), d] += 2 / len(at)
    return rows


def naive_seconds(table: Array, batches: Array, dealt: list[dict[tuple[int, int, int], int]], group: int) -> float:
    """Formulas (1) to (3) of `Costs`, from pairs by (expert, source, device) of every micro-batch."""
    num_devices, seconds = len(table), 0.0
    links = ((COSTS.intra_latency_s, COSTS.intra_s_per_byte), (COSTS.inter_latency_s, COSTS.inter_s_per_byte))
    for routed in dealt:
        load, ports = np.zeros(num_devices), np.zeros((2, 2, num_devices))
        for (_, g, d), n in routed.items():
            load[d] += n
            if g != d:
                far = int(g // group != d // group)
                ports[far, 0, g] += n
                ports[far, 1, d] += n
        used = [a + COSTS.copy_bytes * b * ports[c].max() for c, (a, b) in enumerate(links) if ports[c].any()]
        seconds += COSTS.pair_s * load.max() + 4 * max(used, default=0.0)
    rows = naive_sums(table, batches.shape[1], group).max(axis=1)
    sums = COSTS.gradient_bytes * max(rows[0] * COSTS.intra_sum_s_per_byte, rows[1] * COSTS.inter_sum_s_per_byte)
    return seconds + float(sums)
