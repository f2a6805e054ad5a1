"""The strategies there are: a row each.

Rows are light, so that the command line knows its flags; what a strategy does is imported when it is asked for.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ...errors import UsageError
from ..params import Params, PlacementParams
from .auto import AutoParams
from .eplb import EplbParams
from .exflow import ExflowParams
from .flexmoe import FlexmoeParams
from .luffy import LuffyParams
from .netmoe import NetmoeParams
from .pipemoe import PipemoeParams

if TYPE_CHECKING:
    from ...runtime.plan import Plan
    from .strategy import Strategy


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy's parameters, and where its `STRATEGY` is."""

    params: type[Params]
    module: str


STRATEGIES = {
    "auto": Row(AutoParams, f"{__package__}.auto.strategy"),
    "exflow": Row(ExflowParams, f"{__package__}.exflow.strategy"),
    "pipemoe": Row(PipemoeParams, f"{__package__}.pipemoe.strategy"),
    "netmoe": Row(NetmoeParams, f"{__package__}.netmoe.strategy"),
    "flexmoe": Row(FlexmoeParams, f"{__package__}.flexmoe.strategy"),
    "luffy": Row(LuffyParams, f"{__package__}.luffy.strategy"),
    "eplb": Row(EplbParams, f"{__package__}.eplb.strategy"),
    "contiguous": Row(PlacementParams, f"{__package__}.placement"),
}


def strategy(name: str) -> "Strategy":
    """The strategy of that name."""
    if name not in STRATEGIES:
        raise UsageError(f"--strategy {name}; expected one of {', '.join(STRATEGIES)}")
    chosen: Strategy = import_module(STRATEGIES[name].module).STRATEGY
    return chosen


def decided_by(plan: "Plan") -> "list[Strategy]":
    """The known strategies of a plan in the order they decided."""
    names = [name for name in plan.strategies if name in STRATEGIES]
    return [strategy(name).deciding(plan.decisions.names) for name in names]


def chosen_by(plan: "Plan") -> "list[Strategy]":
    """The strategies that chose among others, as auto does, and left their record."""
    return [strategy(key) for key in plan.options if key in STRATEGIES]
