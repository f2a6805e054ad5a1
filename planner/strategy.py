"""What a strategy is, and which there are.

To add one: a module here with a `solve` from a `Task` to what it `Solved` (a placement strategy has a `place` call
instead), and a row in `STRATEGIES`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UsageError
from ..profilers.cluster import Cluster
from ..runtime.decisions import DispatchModel
from . import contiguous, exflow, netmoe, pipemoe
from .balance import eplb
from .measures.metrics import copies_metric
from .placing import placing
from .solved import Solved
from .task import Task

__all__ = ["STRATEGIES", "Strategy", "strategy"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a strategy is run by default and judged.

    Parameters
    ----------
    decides
        The decision it makes, by its key in a plan.
    dispatch_models
        Those it makes sense under, the default first.
    metric
        What its verdict is about where there is no `step_s` and `Solved` names no other; less is better. Of copies it
        depends on the dispatch model and the cluster: `judged_on`.
    methods
        How it solves, the default first; empty where there is only one way.
    beside
        The decisions that its base (`--on`) may hold.
    """

    name: str
    solve: Callable[[Task], Solved]
    decides: str
    dispatch_models: tuple[DispatchModel, ...]
    metric: str
    methods: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def judged_on(self, dispatch_model: DispatchModel, cluster: Cluster) -> str:
        """Its metric for such plans."""
        return copies_metric(dispatch_model, cluster) if self.metric == "device_copies" else self.metric


STRATEGIES = {
    row.name: row
    for row in (
        Strategy(
            "exflow",
            placing(exflow.searched),
            "placement",
            ("coherent", "standard"),
            "device_copies",
            methods=("annealing", "sweeps", "ilp", "paper"),
        ),
        Strategy(
            "pipemoe",
            pipemoe.solve,
            "pipeline",
            ("standard",),
            "step_s",
            methods=("exact", "paper", "robust", "unequal"),
            beside=("placement",),
        ),
        Strategy(
            "netmoe",
            netmoe.solve,
            "sample_policy",
            ("migrating",),
            "exchange_s",
            methods=("sum", "even", "bottleneck", "paper"),
            beside=("placement", "pipeline"),
        ),
        Strategy(
            "eplb",
            placing(eplb.balanced, by_loads=True),
            "placement",
            ("standard",),
            "balance",
            methods=("refined", "published"),
        ),
        Strategy("contiguous", placing(contiguous.place), "placement", ("standard", "coherent"), "device_copies"),
    )
}


def strategy(name: str) -> Strategy:
    """The strategy of that name."""
    try:
        return STRATEGIES[name]
    except KeyError:
        raise UsageError(f"--strategy {name}; expected one of {', '.join(STRATEGIES)}") from None
