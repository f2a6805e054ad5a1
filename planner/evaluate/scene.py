"""The scene of an evaluation: a trace, who of it runs when, on what cluster, and what times it."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...profilers.cluster import Cluster
from ...traces.count_form import CountTrace
from ...traces.model import ModelSpec
from ...traces.reader import Trace
from .costs import CostModel
from .samples import SampleIndex
from .splits import Cohort, UnitIndex
from .traffic import SampleCounts

__all__ = ["Passes", "Scene"]


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of a step whose MoE layers are cut into chunks.

    Parameters
    ----------
    backward
        How many times as long as forward the experts compute backward; 0 without a backward pass.
    full_duplex
        Whether dispatch and combine do not share a channel (`solvers.pipemoe.seconds.layer_seconds`).
    """

    backward: float
    full_duplex: bool


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """Setting in which contenders are judged: trace, parts, cluster, model and costs.

    Parameters
    ----------
    index
        The units of the trace, by which it is fitted, judged and resampled.
    cohorts
        The parts of the trace: fitted units, then those held out where there are any; or those that judge.
    model
        The trace's, sizes that it lacks as plans know them.
    costs
        What times the parts of a step; None: no seconds.
    samples
        The samples counted one by one, where they may be re-homed.
    passes
        Where some contender's layers are cut into chunks; None: steps are one forward pass of whole layers.
    phases
        Only tokens of these phases count; empty: all.
    """

    source: Trace | CountTrace
    index: UnitIndex | SampleIndex
    cohorts: Sequence[Cohort]
    cluster: Cluster
    model: ModelSpec
    costs: CostModel | None
    seed: int
    phases: Sequence[str] = ()
    samples: SampleCounts | None = None
    passes: Passes | None = None
