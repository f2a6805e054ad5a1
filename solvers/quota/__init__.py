"""The exact split of a step: how many of each source's tokens go to each replica, so that no device holds more than it
must, and then so that the least of them travel; compiled.

Of one layer in one step, let I[e, g] be the token-expert pairs of expert e on source g, and x[p] what slot p serves:
integers with sum over the slots of e of x[p] = I_e. First `least` finds

    lam = min over x of max over devices of load[d] = max over sets A of experts of ceil(I(A) / |N(A)|),

N(A) the devices that hold one of A: a maximum flow, whose violated cut raises lam until there is none. Then `nearest`
finds, among all x with load[d] <= lam, one of the least traffic. On nodes of devices the cheapest way to serve x costs

    sum over slots of (x[p] - I[e, d])+  +  (ratio - 1) x sum over cells of (x[e, n] - I[e, n])+

pairs, a cell being an expert on a node: a minimum-cost flow with an arc a slot, solved by successive shortest paths.
Both are integers alone, so that every rank finds the same. To be imported in the call that needs it.

Legend: E experts; P slots; C cells; D devices; N nodes. Slots here are in the order of their experts, then devices.
"""

import numpy as np

from ..arrays import Ints
from ..compiled import compiled
from .holders import FAR, Holders, holders_of, in_cells, slots_of
from .loads import least, pour, poured, relieve
from .traffic import nearest
from .turns import deal, furthest_behind, in_turn

__all__ = [
    "FAR",
    "Holders",
    "deal",
    "furthest_behind",
    "holders_of",
    "in_cells",
    "in_turn",
    "least",
    "nearest",
    "pour",
    "poured",
    "relieve",
    "shares",
    "slots_of",
    "split",
]


@compiled
def split(pairs: Ints, holders: Holders, ratio: int) -> tuple[Ints, int]:
    """Pairs by slot and source `[P, D]`, and the busiest device's load.

    Parameters
    ----------
    pairs
        `[E, D]`: token-expert pairs by expert and source.
    ratio
        Cost of a pair that crosses nodes over that of one that crosses devices.

    Notes
    -----
    Of 32 experts on 16 devices it takes some ten microseconds, of 256 on 64 some fifty.
    """
    served, most = shares(pairs, holders, ratio)
    return deal(pairs, served, holders), most


@compiled
def shares(pairs: Ints, holders: Holders, ratio: int) -> tuple[Ints, int]:
    """Pairs by slot `[P]`, and the busiest device's load: the split before it is dealt to sources."""
    total = np.empty(len(pairs), np.int64)
    for e in range(len(pairs)):  # a sum along an axis takes five times as long
        total[e] = pairs[e].sum()
    most, _, _ = least(total, holders)
    return nearest(pairs, total, holders, most, ratio), most
