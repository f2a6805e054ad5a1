"""The paper's way: its integer programme in two stages, nodes first, then devices inside each node.

Legend: L MoE layers; N nodes of G devices.
"""

import time

import numpy as np

from .hierarchy import joined, members_of
from .ilp import Backend, IlpResult, solve_ilp
from .programme import Programme

__all__ = ["solve_paper"]

NODE_SHARE = 0.5  # of the time; what it leaves goes to the devices inside the nodes


def solve_paper(programme: Programme, backend: Backend, *, time_limit_s: float, seed: int) -> IlpResult:
    """The layout of the two stages, each solved from experts in their own order.

    Notes
    -----
    Equation 8 under 9-12 with R for routes that leave a node, then, inside each node with the routes that leave it
    dropped, with R for those that leave a device. Tokens of equal path are counted together (`solve_ilp`), which
    changes no optimum. On one node, or with one device a node, there is one stage and its bound is one; the two are
    greedy, hence `proven` says that each stage is optimal, and the bound is infinite. After Ctrl-C the stages that are
    left keep experts in their own order.
    """
    deadline = time.perf_counter() + time_limit_s
    group, num_devices = programme.devices_per_node, len(programme.slots)
    if group in (1, num_devices):
        return solve_ilp(programme, programme.first_layout(), backend, time_limit_s=time_limit_s, seed=seed)
    nodes = programme.of_nodes()
    stages = [solve_ilp(nodes, nodes.first_layout(), backend, time_limit_s=time_limit_s * NODE_SHARE, seed=seed)]
    members = members_of(programme, stages[0].layout)
    for node, member in enumerate(members):
        inside, left_s = programme.inside(node, member), max(deadline - time.perf_counter(), 0.0)
        limit_s = 0.0 if any(stage.interrupted for stage in stages) else left_s / (len(members) - node)
        stages.append(solve_ilp(inside, inside.first_layout(), backend, time_limit_s=limit_s, seed=seed))
    layout = joined(programme, members, [stage.layout for stage in stages[1:]])
    proven, interrupted = all(stage.proven for stage in stages), any(stage.interrupted for stage in stages)
    return IlpResult(layout, np.inf, proven, interrupted)
