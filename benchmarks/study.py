"""What a benchmark is: studies of instances, each run by some methods, a row a method; and the subjects by name."""

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

Instance = TypeVar("Instance")
COPIES_SAVED = "copies between nodes saved, %"  # the quality of many studies
DEFAULT_DATA = Path(os.environ.get("MOEPLAN_DATA") or Path(__file__).parents[2] / "shared" / "data")
SUBJECTS = {
    "exflow": "ExFlow placements: hops kept on unseen tokens, shares of the best known, growth with L, E and D",
    "pipemoe": "PipeMoE degrees: the closed form, brute force and the paper's Algorithm 1",
    "netmoe": "NetMoE homes of samples: Tables 4 and 5, ablation of the prediction, busiest ports, real counts",
    "netmoe_joint": "NetMoE homes and ExFlow placement together, beside either alone",
    "assignment": "Balanced assignment: transportation, min-cost flow, Kuhn-Munkres and CBC",
    "eplb": "EPLB placements: excess over the bound, raw, repaired and refined; groups on nodes; steps not seen",
    "eplb_choice": "EPLB's default beside published EPLB on units held out: like decoding, and recorded",
    "flexmoe": "FlexMoE over a training run: seconds, balance and moves, beside EPLB every 100 steps and the paper",
    "flexmoe_speed": "FlexMoE's exact split of a step and its decisions: seconds beside an LP, a flow and EPLB",
    "luffy": "LUFFY homes of samples: attention and exchange saved, beside dealing, NetMoE and the paper's algorithm",
    "condensation": "LUFFY rows that stand for others: rows saved and loss, beside fp8, dropped experts and the paper",
    "condensed_training": "LUFFY rows that stand for others in training: loss after it, beside fp8 and dropped experts",
    "traces": "Importing and counting a trace, beside plain NumPy",
    "fits": "Fits of published GPU tables: errors on sizes held out",
    "large_trace": "Commands on large traces: linear in tokens, bounded memory",
    "scale": "Counting, placing and certifying at the size of a cluster: workers, 4,096 devices",
    "scale_growth": "Growth at the size of a cluster: counting by tokens, solvers by layers, experts and devices",
    "exflow_paper": "ExFlow's Figures 7, 8 and 13 and Table III: what the paper states beside what comes out here",
    "bounds": "Bounds on the hops that any placement keeps: gap to one that was found, by kind, and seconds",
    "recording": "What recording adds to a model's passes",
    "auto": "auto beside every candidate, each solved anew: held-out gain over today, CPU time over the sum of solves",
    "one_gpu": "Experts of a plan on one GPU, device after device: seconds measured beside those of a preset",
    "cuda": "The runtime on one GPU: experts, its own cost, chunks, condensation, attention, moves, and measuring",
    "rebalancing": "Replicas that follow the load, trained on an emulated cluster: seconds beside seconds predicted",
    "truth": "Figures that others measured and published, beside what moeplan predicts of them",
    "emulated_cluster": "Plans carried out on an emulated cluster: seconds measured beside seconds predicted",
}
PAGES = {"truth": "../truth.md"}  # that do not lie beside their results, with a form of their own
DEFAULT = tuple(SUBJECTS)[:6]  # the strategies and what they solve with


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run was asked for: small instances only, or also the largest, and where real data is."""

    quick: bool = False
    full: bool = False
    data: Path = DEFAULT_DATA


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one instance.

    Parameters
    ----------
    quality, bound
        In the unit of the study's `quality`; no method on this instance is better than the bound.
    seconds, least_s, memory_bytes, ratio
        As `race.Timing` says, unless the study's note says otherwise.
    more
        Further figures by name; units as for `Study.quality`.
    axis, size
        The curve of growth that this row is a point of.
    """

    instance: str
    method: str
    _: KW_ONLY
    quality: float | None = None
    bound: float | None = None
    seconds: float | None = None
    least_s: float | None = None
    memory_bytes: int | None = None
    ratio: float | None = None
    more: dict[str, float] = field(default_factory=dict)
    axis: str = ""
    size: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study(Generic[Instance]):
    """One question to several methods, in phases: instances, then the rows of each.

    Parameters
    ----------
    quality
        What quality and bound are; a name that ends in ", %" is a share, in ", s" seconds.
    baseline
        Whose seconds the ratios are to; empty where none are taken.
    note
        Its first sentence says what the table shows, and stands above it; the others stand below.
    needs
        Real data without which the study is skipped, a path inside `Settings.data`.
    """

    title: str
    quality: str
    instances: Callable[[Settings], Iterable[Instance]]
    rows: Callable[[Instance], Iterable[Row]]
    baseline: str = ""
    note: str = ""
    needs: str = ""


def studies(name: str) -> tuple[Study[Any], ...]:
    """The studies of a subject."""
    found: tuple[Study[Any], ...] = subject(name).STUDIES
    return found


def subject(name: str) -> Any:
    """The module of a subject: its `STUDIES`, and its `page` where that has a form of its own."""
    return importlib.import_module(f".cases.{name}", __package__)
