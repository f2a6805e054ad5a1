"""ExFlow: experts that follow each other, or serve the same tokens, live together."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from ....errors import UsageError
from ...params import HORIZON, HOW, WHOLE, PlacementParams, flag

Objective = Literal["hops", "copies"]
PATIENCE = 100  # of a patient search: seconds for a second's worth of work, also on a machine that is loaded
MOST_LOAD = 4096  # of a device over the mean: all devices there may be


@dataclass(frozen=True, kw_only=True)
class ExflowParams(PlacementParams):
    """Parameters of exflow: how experts that follow each other are kept together."""

    replans: ClassVar[bool] = True
    methods: ClassVar[Mapping[str, str]] = {
        "annealing": "Simulated annealing over all layers",
        "sweeps": "Layer after layer, given its neighbours",
        "ilp": "Integer programme; proven, for small models",
        "paper": "ExFlow's published integer programme",
    }

    method: Literal["annealing", "sweeps", "ilp", "paper"] = flag("annealing", HOW)
    groups: Literal["split", "whole"] = flag("split", WHOLE)
    backend: Literal["ortools", "pulp"] = flag("ortools", "What solves ilp and paper.")
    time_limit_s: float = flag(
        30.0,
        "Seconds for the search.",
        name="time-limit",
        above=0,
        at_most=1e7,
        expected="seconds above 0, at most 1e7",
    )
    objective: Literal["hops", "copies"] | None = flag(None, "What to save; hops, or under standard dispatch copies.")
    bound: Literal["simple", "thorough"] = flag(
        "simple", "Thorough takes up to 10 minutes after the time limit, or Ctrl-C."
    )
    max_load: float | None = flag(
        None,
        "Most load of a device per layer, as a multiple of the mean.",
        at_least=1,
        at_most=MOST_LOAD,
        expected="1 (all devices alike) or more, of the mean",
    )
    work_s: float | None = None  #: Seconds' worth of work after which the search ends; None: those of the limit
    horizon: float | None = flag(
        None,
        HORIZON,
        at_least=1,
        at_most=1e18,
        expected="1 token or more, below 1e18, beside --from",
    )

    def within(self, limit_s: float, *, patient: bool = False) -> Self:
        """Parameters with a shorter search."""
        work_s = min(self.time_limit_s, limit_s)
        return (
            replace(self, time_limit_s=PATIENCE * work_s, work_s=work_s)
            if patient
            else replace(self, time_limit_s=work_s)
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend != "ortools" and self.method not in ("ilp", "paper"):
            raise UsageError(f"--backend {self.backend} without exflow's --method ilp or paper, all that it solves")
        if self.objective == "copies" and self.method != "annealing":
            raise UsageError(f"--objective copies with --method {self.method}; only annealing knows of it")
        if self.groups == "whole" and self.redundant:
            raise UsageError(
                "--groups whole with --redundant; groups take one slot per expert, equally many per device"
            )
