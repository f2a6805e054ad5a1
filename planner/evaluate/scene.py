"""Scene of an evaluation: a trace, its units in steps, the cluster and the cost model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ...profilers.profile import Profile
from ...solvers.arrays import Bools
from ...traces.count_form import CountTrace
from ...traces.model import ModelSpec
from ...traces.reader import Trace
from .cohort import Cohort, by_pairs
from .costs import CostModel
from .step_size import StepSize
from .traffic import Counter, SampleCounts
from .units import SampleIndex, UnitIndex

if TYPE_CHECKING:
    from .journey import Journey

BACKWARD = 2.0  # the gradients of inputs and of weights are two products for each of forward


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of a step in training, or of one whose MoE layers are cut into chunks."""

    backward: float  #: How many times as long as forward the experts compute backward; 0 without a backward pass
    full_duplex: bool  #: Whether dispatch and combine do not share a channel (`solvers.pipemoe.seconds.layer_seconds`)


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """Setting in which contenders are judged: trace, parts, cluster, model and costs."""

    source: Trace | CountTrace
    index: UnitIndex | SampleIndex  #: The units of the trace, by which it is fitted, judged and resampled
    #: The parts of the trace: fitted units, then those held out where there are any; or those that judge
    cohorts: Sequence[Cohort]
    cluster: Cluster
    model: ModelSpec  #: The trace's, sizes that it lacks as plans know them
    costs: CostModel | None  #: What times the parts of a step; None: no seconds
    seed: int
    phases: Sequence[str] = ()  #: Phases whose tokens count; empty: all
    samples: SampleCounts | None = None  #: The samples counted one by one, where they may be re-homed
    #: Where some contender's layers are cut into chunks; None: steps are one forward pass of whole layers
    passes: Passes | None = None
    #: Whether every device holds a shared expert that is load, and SGLang's waterfill says whose tokens it takes
    fills: bool = False

    #: Whether counts hold the pairs of every step by source, so that exchanges are timed
    paired: bool = False
    record_steps: int = 1  #: That a recorded step stands for: the mean distance between two
    #: Pairs of the steps of each cohort, once counted (`choosers.step_pairs`)
    counted: list[NDArray[Any]] = field(default_factory=list, init=False, repr=False)

    def goes_by_pairs(self, journey: "Journey") -> bool:
        """Check whether a journey on counts goes by the pairs of every step, by source where these are known."""
        if self.samples is not None:
            return False
        return journey.following is not None or (self.paired and journey.dispatch_model == "standard")

    @classmethod
    def of(
        cls,
        source: Trace | CountTrace,
        index: UnitIndex | SampleIndex,
        parts: Sequence[Bools],
        cluster: Cluster,
        *,
        size: StepSize,
        profile: Profile | None = None,
        model: ModelSpec | None = None,
        seed: int = 0,
        phases: Sequence[str] = (),
        passes: Passes | None = None,
        linked: Bools | None = None,
        counter: Counter | None = None,
        padded: bool = False,
        fills: bool = False,
    ) -> Self:
        """The scene of a trace whose units in each part, `[U]`, run in steps of a size where none were recorded.

        A profile times the parts of a step, without one the cluster's links, where it has any. The model is the trace's
        unless given; `linked`, `counter` and `padded` are as `fitted` and others of `SampleCounts`. UsageError where a
        scene that `fills` is none of tokens, or its model has not one shared expert.
        """
        if fills:
            check_waterfill(source, source.meta.model if model is None else model)
        model = source.meta.model if model is None else model
        samples = None
        if isinstance(index, SampleIndex):
            samples = SampleCounts(
                source, index, linked, cluster, phases=phases or None, counter=counter, padded=padded
            )
        cohorts = [index.cohort(part_U, num_devices=cluster.num_devices, size=size) for part_U in parts]
        of_counts = isinstance(source, CountTrace)
        paired = samples is None and of_counts and by_pairs(cohorts, model)
        by_loads = samples is None and of_counts and not paired
        in_samples = index.kind == "sample" or (not of_counts and "sample" in source.known)
        queries = 1.0 if any(cohort.lanes for cohort in cohorts) else index.queries
        costs = CostModel.of(
            profile,
            cluster,
            model,
            samples=in_samples,
            queries=queries,
            by_loads=by_loads,
            moving=samples is not None,
        )
        recorded = index.steps if isinstance(index, UnitIndex) else None
        steps = np.zeros(0) if recorded is None else np.unique(recorded[:, 1])
        record_steps = round(float(steps[-1] - steps[0]) / (len(steps) - 1)) if len(steps) > 1 else 1
        return cls(
            source,
            index,
            cohorts,
            cluster,
            model,
            costs,
            seed,
            phases,
            samples,
            passes,
            fills,
            paired,
            max(record_steps, 1),
        )


def check_waterfill(source: Trace | CountTrace, model: ModelSpec) -> None:
    """Refuse shared experts as load where it is not known which devices a token visits, or there is not one of them."""
    if isinstance(source, CountTrace):
        raise UsageError(
            f"--waterfill with {source.path}: counts do not say which devices a token visits; give a trace of tokens"
        )
    if model.num_shared_experts is None:
        raise UsageError(
            f"--waterfill, and it is not known whether {model.name} has a shared expert; expected one per layer:"
            " import the trace with --hf-config config.json"
        )
    if model.num_shared_experts != 1:
        raise UsageError(
            f"--waterfill, and {model.name} has {model.num_shared_experts or 'no'} shared experts per layer; SGLang's"
            " needs exactly one: leave it out"
        )
