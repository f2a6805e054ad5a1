"""What a benchmark is: studies of instances, each run by some methods, a row a method."""

import os
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

Instance = TypeVar("Instance")
COPIES_SAVED = "copies between nodes saved, %"  # the quality of many studies
DEFAULT_DATA = Path(os.environ.get("MOEPLAN_DATA") or Path(__file__).parents[2] / "shared" / "data")


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
