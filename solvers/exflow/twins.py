"""Annealing of replicas: every slot as an expert of its own, those of one expert on different devices.

Legend: L MoE layers; P slots a layer; D devices.
"""

import numpy as np

from ..compiled import COMPILED
from ..placement import Placement
from .budget import Budget
from .incumbent import Incumbent
from .programme import Programme
from .terms import Terms

__all__ = ["anneal_replicas"]

MOST_CELLS = 2**25  # of weights between slots; 0.7 GB


def anneal_replicas(programme: Programme, placement: Placement, budget: Budget, rng: np.random.Generator) -> Placement:
    """The placement that annealing leads to from another one with as many replicas of every expert; that one if large.

    For one level of links.

    Notes
    -----
    What a slot's tokens keep does not depend on how many replicas the next expert has, if these are on different
    devices: they use the one at hand. Its own share of an expert's tokens is taken to be the same for all replicas,

        W'[l, s, t] = W[l, e(s), e(t)] / |replicas of e(s)|
    """
    cells = len(programme.weights) * placement.num_slots**2
    if not COMPILED or budget.exhausted or cells > MOST_CELLS:
        return placement
    from .rounds import anneal_rounds

    expert_LP, layers = placement.physical_to_logical.astype(np.int64), range(placement.num_layers)
    count_LP = np.stack([np.bincount(row, minlength=placement.num_experts)[row] for row in expert_LP])
    weights = [
        weight[np.ix_(expert_LP[cut], expert_LP[cut + 1])] / count_LP[cut][:, None]
        for cut, weight in enumerate(programme.weights)
    ]
    near, group = programme.near, programme.devices_per_node
    slots = Programme(weights, (placement.num_slots,) * len(layers), programme.slots, near, group)
    terms = Terms(twin=np.where(count_LP > 1, expert_LP, -1))
    incumbent = Incumbent(slots, start=[placement.device_of_slot.copy() for _ in layers])
    anneal_rounds(slots, terms, budget, rng, incumbent, fresh=False)
    held = [
        [np.sort(expert_LP[layer][incumbent.layout[layer] == device]).tolist() for device in range(len(slots.slots))]
        for layer in layers
    ]
    return Placement.from_sets(held, placement.num_experts)
