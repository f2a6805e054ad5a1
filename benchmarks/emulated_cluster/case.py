"""What a case is: prepared where it was asked for, run on every rank, told beside what the profile predicts.

Ranks only measure: solving and predicting, which compute, are done before and after.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moeplan.profilers.cluster import Cluster

from .calibration import Profile
from .figures import Figure
from .timing import Seconds

Measured = Mapping[str, Seconds]  # by way


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
