"""What the pipeline solvers return.

Legend: L MoE layers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..outcome import Outcome

__all__ = ["Degrees", "LayerDegrees"]


@dataclass(frozen=True, slots=True)
class Degrees:
    """Pipeline degrees of one layer, with the seconds they take, and how they came about.

    Parameters
    ----------
    forward, backward
        A degree for each pass; `backward` is 1 where there is no backward pass.
    joint
        The one degree for both passes (Tutel has one).
    forward_s, backward_s
        Seconds of the passes at their own degrees.
    joint_s
        Seconds of both passes at `joint`.
    outcome
        Of `forward` and `backward`: its objective is forward_s + backward_s.
    """

    forward: int
    backward: int
    joint: int
    forward_s: float
    backward_s: float
    joint_s: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class LayerDegrees:
    """`Degrees` of many layers, `[L]` each; the objective is the sum over them."""

    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    joint: NDArray[np.int64]
    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    joint_s: NDArray[np.float64]
    outcome: Outcome
