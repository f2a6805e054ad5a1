"""The chain of assignments: one layer is given, every next one is assigned to it at its best.

With one expert a device and one level of links the chain is optimal: relabelling makes layer pairs independent.
"""

import numpy as np

from ..assignment import assign_places
from .budget import Budget
from .programme import Layout, Programme

__all__ = ["chain"]


def chain(programme: Programme, start: int, budget: Budget, rng: np.random.Generator) -> Layout:
    """The layout that grows from a random layer `start` in both directions, each layer optimal for the one given.

    Layers that time does not reach hold experts in their own order.
    """
    layout = programme.first_layout()
    layout[start] = rng.permutation(programme.places)[: programme.sizes[start]]
    for layer in range(start + 1, programme.num_layers):
        if budget.late:
            return layout
        layout[layer] = assign_places(-programme.before(layout, layer), programme.places)
    for layer in reversed(range(start)):
        if budget.late:
            return layout
        layout[layer] = assign_places(-programme.after(layout, layer), programme.places)
    return layout
