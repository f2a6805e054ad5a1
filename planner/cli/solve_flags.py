"""The flags of `moeplan solve`, by what they are about; a strategy's own are a group."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import UsageError
from .options import Backend, Bound, Dispatch, Groups, Method, Objective, Phase, Strategy

MOST_DIGITS = 9

__all__ = ["Balance", "Fit", "Pipeline", "Replan", "Search", "Slots", "Solver", "Where"]


@dataclass(frozen=True)
class Where:
    """What is planned by, from what, and for what machine."""

    strategy: Annotated[Strategy, typer.Option(help="What to plan by.")] = Strategy.EXFLOW
    trace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACE[:WEIGHT]",
            help="The trace: a directory, a file or a URI; traces. eplb: several with weights.",
            show_default=False,
        ),
    ] = None
    profile: Annotated[
        Path | None, typer.Option(help="The profile; profile.json where there is one.", show_default=False)
    ] = None
    cluster: Annotated[
        str | None, typer.Option(help="NxG: N nodes of G devices, instead of the profile's.", show_default=False)
    ] = None
    link: Annotated[
        list[str] | None,
        typer.Option(help="KIND=GBps:us, instead of the profile's; may repeat.", show_default=False),
    ] = None
    on: Annotated[
        Path | None, typer.Option(help="A plan to add this decision to; its cluster.", show_default=False)
    ] = None

    def found(self, *, on: Path | None) -> dict[str, Any]:
        """These of a request, profile and cluster looked for, the cluster also in the plan `on`."""
        from ..inputs import cluster_for, profile_for

        profile = profile_for(self.profile)
        cluster = cluster_for(self.cluster, profile, self.link or (), on=self.on or on)
        traces = [_weighted(text) for text in self.trace or ["traces"]]
        alone = len(traces) == 1 and traces[0][1] is None
        return {
            "strategy": self.strategy.value,
            "trace": traces[0][0],
            "mixture": () if alone else tuple((path, 1.0 if weight is None else weight) for path, weight in traces),
            "profile": profile,
            "cluster": cluster,
            "on": self.on,
        }


@dataclass(frozen=True)
class Solver:
    """How it is solved."""

    dispatch: Annotated[Dispatch | None, typer.Option(help="Instead of the strategy's own.", show_default=False)] = None
    method: Annotated[Method | None, typer.Option(help="How to solve; the strategy's own.", show_default=False)] = None
    backend: Annotated[Backend, typer.Option(help="What solves exflow's ilp and paper.")] = Backend.ORTOOLS
    time_limit: Annotated[float, typer.Option(help="exflow: seconds for the search.")] = 30.0
    seed: Annotated[int, typer.Option(help="Seed of split, search and intervals.")] = 0

    def chosen(self) -> dict[str, Any]:
        """These of a request."""
        return {
            "dispatch_model": self.dispatch and self.dispatch.value,
            "method": self.method and self.method.value,
            "backend": self.backend.value,
            "time_limit_s": self.time_limit,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Search:
    """What exflow alone is asked for."""

    objective: Annotated[
        Objective | None,
        typer.Option(help="exflow: what to save; hops, or under standard dispatch copies.", show_default=False),
    ] = None
    bound: Annotated[
        Bound, typer.Option(help="exflow: thorough takes up to 10 minutes after the time limit, or Ctrl-C.")
    ] = Bound.SIMPLE
    max_load: Annotated[
        float | None,
        typer.Option(help="exflow: most tokens of a device in a layer, over the mean.", show_default=False),
    ] = None

    def chosen(self) -> dict[str, Any]:
        """These of a request."""
        objective = self.objective and self.objective.value
        return {"objective": objective, "bound": self.bound.value, "max_load": self.max_load}


@dataclass(frozen=True)
class Slots:
    """Expert slots, for strategies that place experts."""

    slots: Annotated[
        int | None, typer.Option(help="Expert slots a device; surplus ones hold replicas.", show_default=False)
    ] = None
    redundant: Annotated[
        str, typer.Option(metavar="N|auto", help="Slots beyond one an expert, in all; eplb: auto weighs how many.")
    ] = "0"

    def chosen(self) -> dict[str, Any]:
        """These of a request."""
        redundant = self.redundant
        if redundant != "auto" and not _is_number(redundant.removeprefix("-")):
            raise UsageError(f"--redundant {redundant:.40}; expected a number of slots, or auto")
        return {"slots": self.slots, "redundant": redundant if redundant == "auto" else int(redundant)}


@dataclass(frozen=True)
class Balance:
    """What eplb, and of groups exflow, is asked for."""

    groups: Annotated[
        Groups, typer.Option(help="eplb, exflow: whole keeps each expert group in one block of slots.")
    ] = Groups.SPLIT
    dead: Annotated[
        list[int] | None,
        typer.Option(metavar="RANK", help="eplb: a rank without experts; may repeat.", show_default=False),
    ] = None
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="EXPERT@DEVICE", help="eplb: held there in all layers; may repeat.", show_default=False),
    ] = None
    quantile: Annotated[
        float | None,
        typer.Option(help="eplb: of the recorded steps' balance, instead of its mean.", show_default=False),
    ] = None

    def chosen(self) -> dict[str, Any]:
        """These of a request."""
        return {
            "groups": self.groups.value,
            "dead": tuple(sorted({*(self.dead or ())})),
            "pins": tuple(sorted({_pin(text) for text in self.pin or ()})),
            "quantile": self.quantile,
        }


@dataclass(frozen=True)
class Replan:
    """What takes the place of a plan in force."""

    previous: Annotated[
        Path | None,
        typer.Option("--from", help="exflow: the plan in force, to move few experts from.", show_default=False),
    ] = None
    horizon: Annotated[
        float | None,
        typer.Option(help="With --from: tokens within which a move must pay for itself.", show_default=False),
    ] = None

    def chosen(self) -> dict[str, Any]:
        """These of a request."""
        return {"previous": self.previous, "horizon_tokens": self.horizon}


@dataclass(frozen=True)
class Pipeline:
    """What pipemoe alone is asked for."""

    max_degree: Annotated[int | None, typer.Option(help="pipemoe: chunks at most; 32.", show_default=False)] = None
    joint: Annotated[bool, typer.Option("--joint", help="pipemoe: one degree for both passes.")] = False
    full_duplex: Annotated[
        bool, typer.Option("--full-duplex", help="pipemoe: combines have a channel of their own.")
    ] = False
    capacity_factor: Annotated[
        float | None,
        typer.Option(help="pipemoe: rows of an expert, over the mean; padded to the degrees.", show_default=False),
    ] = None


@dataclass(frozen=True)
class Fit:
    """What of the trace is fitted, and how it makes steps."""

    phase: Annotated[
        list[Phase] | None, typer.Option(help="Only tokens of this phase; may repeat.", show_default=False)
    ] = None
    fit_fraction: Annotated[float, typer.Option(help="Share of samples to fit on; the rest judges.")] = 0.5
    samples_per_step: Annotated[int | None, typer.Option(help="Samples of a step; 4 a device.", show_default=False)] = (
        None
    )

    def chosen(self) -> dict[str, Any]:
        """These of a request."""
        phases = tuple(one.value for one in self.phase or ())
        return {"phases": phases, "fit_fraction": self.fit_fraction, "samples_per_step": self.samples_per_step}


def _weighted(text: str) -> tuple[str, float | None]:
    """A trace and its weight of `TRACE`, which may be a name with colons that is there, or `TRACE:WEIGHT`."""
    path, colon, weight = text.rpartition(":")
    try:
        return (path, float(weight)) if colon and path and not os.path.exists(text) else (text, None)
    except ValueError:
        return text, None


def _pin(text: str) -> tuple[int, int]:
    """An expert and a device of `EXPERT@DEVICE`."""
    expert, at, device = text.partition("@")
    if not (at and _is_number(expert) and _is_number(device)):
        raise UsageError(f"--pin {text:.40}; expected EXPERT@DEVICE, e.g. 12@3")
    return int(expert), int(device)


def _is_number(text: str) -> bool:
    """Whether it is digits, and not too many of them."""
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS
