"""A placement to begin with: replicas apportioned, packed, and searched for on a set of records.

Legend: W records; L MoE layers; M micro-batches; E experts; D devices in nodes of G, S slots of each.
"""

from dataclasses import replace

import numpy as np

from ...workers import Workers, given
from ..arrays import Ints
from .costs import Costs
from .follow import Seen, first_homes
from .policy import Policy, planned
from .rivals import eplb_table

DEEP = Policy(trigger=1.0, horizon=1e12, slack=0.0, kicks=100, evaluations=3000)  # nothing that moves is paid for
BALANCE_ALONE = replace(DEEP, evaluations=0)


def initial(
    records: Ints, slots: int, costs: Costs, *, group: int, policy: Policy = DEEP, workers: Workers | None = None
) -> Ints:
    """Tables `[L, D, S]` of few predicted seconds on the records, the expert in every slot, -1 in an empty one.

    Parameters
    ----------
    records
        Token-expert pairs of a few records, 4 to 8, which are planned for as a set: `[W, L, M, E, D]`.
    slots
        S, room for experts on every device.
    group
        G, devices of a node.
    policy
        Its evaluations; none: few operations for balance alone.
    workers
        Workers that place the layers; None: threads. The tables are the same whichever do.

    Notes
    -----
    EPLB of the records' sum, refined; then as `policy.planned`.
    """
    rows = (
        (np.ascontiguousarray(records[:, layer]), layer, slots, costs, group, policy)
        for layer in range(records.shape[1])
    )
    with given(workers) as there:
        return np.array([*there.map(_initial_layer, rows)])


def _initial_layer(window: Ints, layer: int, slots: int, costs: Costs, group: int, policy: Policy) -> Ints:
    """The table of one layer `[D, S]`, whose records are `[W, M, E, D]`."""
    table = eplb_table(window, slots, "refined")
    home = first_homes(table, window.shape[2])
    seen = Seen.of(0, layer, window, table, home, group=group, costs=costs)
    return planned(seen, policy, policy.evaluations)
