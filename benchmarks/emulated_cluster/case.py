"""What a case is: prepared where it was asked for, run on every rank, told beside what the profile predicts.

Ranks only measure: solving and predicting, which compute, are done before and after.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moeplan.profilers.cluster import Cluster

from .calibration import Profile
from .timing import Seconds

Measured = Mapping[str, Seconds]  # by way


@dataclass(frozen=True, slots=True)
class Figure:
    """One way to run one step.

    Parameters
    ----------
    instance, method
        The step and the way.
    measured, predicted_s
        Its seconds, and what the profile predicted.
    ratio
        How many times as fast as the instance's first way, with its interval.
    told
        Further figures by name, units as in a study's rows.
    axis, size, curve
        Where in the picture it is a point, and of which curve: the way's, unless told.
    """

    instance: str
    method: str
    measured: Seconds
    predicted_s: float | None = None
    ratio: tuple[float, float, float] | None = None
    told: dict[str, float] = field(default_factory=dict)
    axis: str = ""
    size: float | None = None
    curve: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """Ways to run the same steps.

    Parameters
    ----------
    prepare
        Everything that needs no rank, picklable.
    run
        The seconds of every way, in `rounds` rounds; all ranks call it together.
    told
        The figures that it comes to.
    """

    prepare: Callable[[Cluster], Any]
    run: Callable[[Cluster, int, Profile, Any, int], Measured]
    told: Callable[[Cluster, Profile, Any, Measured], list[Figure]]
