"""FlexMoE: replicas that follow the load while a model trains.

`initial` places experts for a set of records, `Policy` says when and how they change, `follow` replays a whole run
under it or one of the rivals, `exact` is the placement that proves how few slots are enough.
"""

from .costs import Costs
from .exact import exact
from .follow import Change, Decide, Operation, Run, Seen, Split, follow
from .initial import initial
from .policy import Policy
from .rivals import EveryEplb, Paper, Stay

__all__ = [
    "Change",
    "Costs",
    "Decide",
    "EveryEplb",
    "Operation",
    "Paper",
    "Policy",
    "Run",
    "Seen",
    "Split",
    "Stay",
    "exact",
    "follow",
    "initial",
]
