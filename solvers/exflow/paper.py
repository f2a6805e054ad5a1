"""The paper's way: its integer programme in two stages, nodes first, then devices inside each node.

Legend: L MoE layers; N nodes of G devices.
"""

import time

import numpy as np

from .hierarchy import fill_node
from .ilp import Backend, IlpResult, solve_ilp
from .programme import Layout, Programme

__all__ = ["solve_paper"]

NODE_SHARE = 0.5  # of the time; what it leaves goes to the devices inside the nodes


def solve_paper(programme: Programme, backend: Backend, *, time_limit_s: float, seed: int) -> IlpResult:
    """The layout of the two stages, each solved from experts in their own order.

    Notes
    -----
    Equation 8 under 9-12 with R for routes that leave a node, then, inside each node with the routes that leave it
    dropped, with R for those that leave a device. Tokens of equal path are counted together (`solve_ilp`), which
    changes no optimum. On one node, or with one device a node, there is one stage and its bound is one; the two are
    greedy, hence `proven` says that each stage is optimal, and the bound is infinite.
    """
    deadline = time.perf_counter() + time_limit_s
    group, num_devices = programme.devices_per_node, len(programme.slots)
    if group in (1, num_devices):
        return solve_ilp(programme, programme.first_layout(), backend, time_limit_s=time_limit_s, seed=seed)
    nodes, proven = _stage(programme.of_nodes(), backend, time_limit_s * NODE_SHARE, seed)
    layout = [np.empty(size, np.int64) for size in programme.sizes]
    for node in range(num_nodes := num_devices // group):
        members = [np.flatnonzero(node_E == node) for node_E in nodes]
        if not any(map(len, members)):
            continue
        share_s = max(deadline - time.perf_counter(), 0.0) / (num_nodes - node)
        inside, optimal = _stage(programme.inside(node, members), backend, share_s, seed)
        proven &= optimal
        fill_node(layout, members, inside, node * group)
    return IlpResult(layout, np.inf, proven)


def _stage(programme: Programme, backend: Backend, time_limit_s: float, seed: int) -> tuple[Layout, bool]:
    """One stage's layout, experts in their own order where there was no time for any other, and whether it is best."""
    start = programme.first_layout()
    found = solve_ilp(programme, start, backend, time_limit_s=time_limit_s, seed=seed)
    return start if found.layout is None else found.layout, found.proven
