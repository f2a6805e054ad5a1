"""The chain of assignments: one layer is given, every next one is assigned to it at its best.

With one expert a device and one level of links the chain is optimal: relabelling makes layer pairs independent.
"""

import numpy as np

from ..assignment import assign_places
from .budget import Budget
from .programme import Layout, Programme
from .work import layer_work

__all__ = ["chain"]


def chain(programme: Programme, start: int, budget: Budget, rng: np.random.Generator) -> Layout:
    """The layout that grows from a random layer `start` in both directions, each layer optimal for the one given.

    With one expert a device and one level of links, devices that no layer needs are the same in all layers, so that
    replicas find them free in all. Layers that time does not reach hold experts in their own order; work ends none.
    """
    layout, dealt = programme.first_layout(), rng.permutation(programme.places)[: max(programme.sizes)]
    layout[start] = dealt[: programme.sizes[start]]
    same = programme.slots.max() == 1 and not programme.node_worth
    places = np.sort(dealt) if same else programme.places
    for layer in range(start + 1, programme.num_layers):
        if budget.late:
            return layout
        layout[layer] = assign_places(-programme.before(layout, layer), places)
        budget.spend(layer_work(programme.sizes[layer], len(places)))
    for layer in reversed(range(start)):
        if budget.late:
            return layout
        layout[layer] = assign_places(-programme.after(layout, layer), places)
        budget.spend(layer_work(programme.sizes[layer], len(places)))
    return layout
