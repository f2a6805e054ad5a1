"""Task of a strategy: its request, the trace, the base, and figures of both that are read once.

Legend: U units; B steps; L MoE layers; E experts.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from ..errors import InputError, MismatchError, UsageError
from ..profilers.profile import load as load_profile
from ..runtime.decisions import DispatchModel
from ..runtime.plan import Plan
from ..runtime.wire import Wire
from ..solvers.arrays import Bools, Ints
from ..solvers.placement import Placement, slots_for
from ..solvers.replicas import ReplayRule
from ..traces.count_form import CountTrace, open_any
from ..traces.counts import Counts
from ..traces.model import ModelSpec
from ..traces.reader import Trace
from ..traces.split import earliest
from ..workers import Workers
from .evaluate.journey import today
from .evaluate.replay import RememberingReplay, Replay, step_loads, tallied
from .evaluate.scene import Scene
from .evaluate.step_size import FIELDS, StepSize, Use, as_prompts, use_of, usual_size
from .evaluate.steps import FEW
from .evaluate.traffic import walk_samples
from .evaluate.units import SampleIndex, UnitIndex, index_samples, index_units
from .loaded_plan import check_model
from .options import EvaluationOptions
from .params import Params, PlacementParams
from .request import FIT_FRACTION, Request
from .strategies.strategy import Strategy

T = TypeVar("T")
Index = TypeVar("Index", UnitIndex, SampleIndex)
INNER = 0.5  # of the fitted units, that decide where candidates are compared on the others
PARTS = 4  # of the fitted units, three of which are much like all of them


def silent(_: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Task:
    """A checked request; its files are read once, when first needed."""

    bounds: ClassVar[bool] = True  # whether what is decided is bounded, too
    tallied = staticmethod(tallied)  # what tallies journeys
    counter = staticmethod(walk_samples)  # what counts samples

    request: Request
    strategy: Strategy
    base: Plan | None  #: Of `--on`: for this cluster and, once the trace is open, for its model
    dispatch_model: DispatchModel  #: As asked for, else the strategy's own
    say: Callable[[str], None] = silent  #: Told what begins, in a few words
    workers: Workers | None = None  #: Where layers and the like are solved; None: on threads of this process
    previous: Plan | None = None  #: Of `--from`, as `base`
    #: Whether a part of the fitted units decides and the rest of these judges, as where candidates are compared
    inner: bool = False
    base_files: Mapping[str, bytes] = field(default_factory=dict)  #: Files of a base that is in no folder yet
    shared: dict[Hashable, Any] = field(default_factory=dict, repr=False)  #: What tasks on the same traces have read

    @property
    def moves_samples(self) -> bool:
        """Check whether samples may be re-homed, so that they are counted one by one."""
        return self.strategy.moves_samples or (self.base is not None and "sample_policy" in self.base.decisions.names)

    @property
    def wire(self) -> Wire | None:
        """The form in which hidden vectors travel: as asked for, else that of the base or of the plan in force."""
        return self.request.wire or next((plan.decisions.wire for plan in (self.base, self.previous) if plan), None)

    @property
    def engine_rule(self) -> ReplayRule | None:
        """The rule of an engine by which plans are judged; None: their own, as where counts tell no token's device."""
        return None if isinstance(self.source, CountTrace) else self.request.engine_rule

    @property
    def params(self) -> Params:
        """Parameters of the strategy."""
        return self.request.params

    @cached_property
    def source(self) -> Trace | CountTrace:
        """The trace, of either form; MismatchError unless its model is that of the base and of the plan in force."""
        trace = self.once(("source",), lambda: open_any(self.request.trace))
        if self.base is not None:
            check_model(self.request.on, self.base.model, trace)
        if self.previous is not None:
            check_model(self.request.previous, self.previous.model, trace, unknown=True)
        return trace

    @property
    def trace(self) -> Trace:
        """The trace, refused in count form."""
        if isinstance(self.source, CountTrace):
            raise InputError(
                f"{self.source.path}: counts alone; {self.request.strategy} needs tokens: give the trace that they were"
                " counted from, or balance these loads with --strategy eplb"
            )
        if self.dispatch_model == "coherent":
            self.source.check_first_choices("coherent dispatch")
        return self.source

    @property
    def model(self) -> ModelSpec:
        """The model of the trace."""
        return self.source.meta.model

    @cached_property
    def units(self) -> UnitIndex:
        """The units of the trace."""
        by_step = self.strategy.by_time
        return self.once(("units", by_step), lambda: self._indexed(partial(index_units, by_step=by_step)))

    @cached_property
    def index(self) -> UnitIndex | SampleIndex:
        """Units of the split and of resampling: the trace's own, or its samples where they may be re-homed."""
        if not self.moves_samples:
            return self.units
        return self.once(("samples",), lambda: self._indexed(index_samples))

    def _indexed(self, how: Callable[..., Index]) -> Index:
        self.say("reading the trace")
        return how(self.source, phases=self.request.phases or None)

    def portable(self) -> Self:
        """The task as workers get it: with the trace open and nothing else that was read."""
        source = (self.request.trace, "source")
        return dataclasses.replace(self, say=silent, workers=None, shared={source: self.source.unread()})

    def once(self, key: tuple[Hashable, ...], read: Callable[[], T]) -> T:
        """Figures of a trace that several tasks share."""
        key = (self.request.trace, *key)
        if key not in self.shared:
            self.shared[key] = read()
        known: T = self.shared[key]
        return known

    @cached_property
    def _seen(self) -> Bools:
        """Units that are not held out, `[U]`. InputError where that leaves none on either side."""
        seen_U = self._split(np.ones(len(self.index.unit_tokens), np.bool_), self.fit_fraction)
        if not seen_U.any() or (self.fit_fraction < 1 and seen_U.all()):
            raise InputError(
                f"{self.source.path}: {len(seen_U)} {self.index.kind} in all; expected two or more, to fit some and"
                " hold others out. Record more, or give --fit-fraction 1"
            )
        return seen_U

    def _split(self, of: Bools, fraction: float, salt: str = "") -> Bools:
        """Mask of a share of some units `[U]`: the first of them where time tells them apart, else drawn by hash."""
        if self.strategy.by_time:
            return earliest(of, fraction)
        return of & self.index.fitted(seed=self.request.seed, fraction=fraction, salt=salt)

    @cached_property
    def judging(self) -> Bools:
        """Mask of the units that judge, `[U]`: those not fitted, else the fitted ones."""
        others_U = (self._seen & ~self.fitted) if self.inner else ~self.fitted
        return others_U if others_U.any() else self.fitted

    @property
    def fit_fraction(self) -> float:
        """The share of units to fit on; unless asked for half of them, or all where there is one alone."""
        if self.request.fit_fraction is not None:
            return self.request.fit_fraction
        return 1.0 if len(self.index.unit_tokens) == 1 else FIT_FRACTION

    @cached_property
    def fitted(self) -> Bools:
        """Mask of the fitted units, `[U]`: those not held out; `inner`: some of them, all where there is only one."""
        if not self.inner:
            return self._seen
        part_U = self._split(self._seen, INNER, salt="inner:")
        return part_U if part_U.any() and (self._seen & ~part_U).any() else self._seen

    @cached_property
    def use(self) -> Use | None:
        """Use that is planned for: as asked for, else by the phases of the tokens."""
        return self.use_for(self.request.purpose or ("training" if self.strategy.by_time else None))

    def use_for(self, purpose: str | None) -> Use | None:
        """Use for a purpose; None: by the phases of the tokens."""
        size, whole = self.request.size if self._derives_steps else None, self.moves_samples
        return use_of(self.index.phases, size, purpose, whole=whole or self.index.kind != "sample")

    @cached_property
    def size(self) -> StepSize:
        """Size of a step where none were recorded: as asked for, else usual for the use.

        Samples that move are resampled by whole steps: where a part holds few usual ones, by smaller steps.
        """
        usual = self.request.size or usual_size(self.use, self.request.cluster.num_devices)
        if self.request.size is not None or not self.moves_samples:
            return usual
        tokens_U = self.index.unit_tokens
        least = min(int(tokens_U[part_U].sum()) for part_U in (self.fitted, self.judging))
        fewest = int(tokens_U.mean() * self.request.cluster.num_devices)
        return StepSize("tokens", min(usual.number, max(least // FEW, fewest, 1)))

    @property
    def _derives_steps(self) -> bool:
        return "step" not in self.source.known

    @cached_property
    def scene(self) -> Scene:
        """Setting in which contenders are judged: on the fitted units, then on those held out where there are any."""
        passes, fitted_U, judging_U = self.strategy.passes(self), self.fitted, self.judging
        parts = [fitted_U] if judging_U is fitted_U else [fitted_U, judging_U]
        key = ("scene", self.moves_samples, self.inner, self.size, passes, self.strategy.pads(self))
        return self.once(key, lambda: self._scene_of(parts))

    @cached_property
    def in_parts(self) -> Scene:
        """Setting in which choices are made: the fitted units in parts of equal size, drawn by the seed.

        Each part can judge what is made of the others. Of one unit there is one part.
        """
        place = np.random.default_rng(self.request.seed).permutation(np.flatnonzero(self.fitted))
        unit_U, parts = np.arange(len(self.fitted)), min(PARTS, len(place))
        return self._scene_of([np.isin(unit_U, place[first::parts]) for first in range(parts)])

    def _scene_of(self, parts: list[Bools]) -> Scene:
        """The scene of parts of the trace's units."""
        request = self.request
        return Scene.of(
            self.source,
            self.index,
            parts,
            request.cluster,
            size=self.size,
            profile=None if request.profile is None else load_profile(request.profile),
            seed=request.seed,
            phases=request.phases,
            passes=self.strategy.passes(self),
            linked=self.fitted,
            counter=self.counter,
            padded=self.strategy.pads(self),
            fills=request.waterfill,
        )

    @cached_property
    def replay(self) -> Replay:
        """Tallies journeys, each once for all tasks on a trace."""
        return self.once(("replay",), lambda: RememberingReplay(self.tallied))

    @cached_property
    def members(self) -> list[tuple[float, Self]]:
        """A task for each trace, with its weight; all weights together are 1.

        MismatchError for traces of several models; UsageError where they split or make steps in several ways.
        """
        request = self.request
        if not request.mixture:
            return [(1.0, self)]
        total, members = sum(weight for _, weight in request.mixture), []
        for path, weight in request.mixture:
            member = dataclasses.replace(self, request=dataclasses.replace(request, trace=path, mixture=()))
            if member.model != self.model:
                raise MismatchError(
                    f"{path}: a trace of another model than {request.trace}; expected one model for all"
                )
            if member.evaluation_options != self.evaluation_options:
                raise UsageError(
                    f"{path}: it splits by {member.evaluation_options.unit}, {request.trace} by"
                    f" {self.evaluation_options.unit}, or steps and ranks are recorded in one of them alone, or one"
                    " is of decode; expected traces of one kind: count them (moeplan trace count), or give"
                    " --tokens-per-step"
                )
            members.append((weight / total, member))
        return members

    @property
    def scenes(self) -> list[tuple[float, Scene]]:
        """The scene of each trace, with its weight."""
        return [(weight, member.scene) for weight, member in self.members]

    @property
    def judging_scenes(self) -> list[tuple[float, Scene]]:
        """Weighted scenes with the part that judges alone."""
        return [(weight, self.once(("judging", scene), partial(_judging, scene))) for weight, scene in self.scenes]

    def resized(self, factor: float) -> list[tuple[float, Scene]]:
        """The scene of each trace on the part that judges alone, in steps of another size."""
        return [(weight, member._resized(factor)) for weight, member in self.members]

    def _resized(self, factor: float) -> Scene:
        devices, size = self.request.cluster.num_devices, self.size.times(factor)
        cohort = self.index.cohort(self.judging, num_devices=devices, size=size)
        return dataclasses.replace(self.scene, cohorts=[cohort])

    @cached_property
    def counts(self) -> Counts:
        """Counts of the fitted units, as the strategy needs them."""
        return self.strategy.count(self)

    @cached_property
    def steps(self) -> list[Ints]:
        """Loads of experts in every complete step `[B, L, E]`: of the fitted units, then of each of `in_parts`."""

        def read() -> list[Ints]:
            return step_loads(dataclasses.replace(self.scene, cohorts=[self.scene.cohorts[0], *self.in_parts.cohorts]))

        return self.once(("steps", *self.fitted_by, self.size), read)

    @property
    def fitted_by(self) -> tuple[Hashable, ...]:
        """Key of the fitted units, of tasks on the same trace."""
        return (self.moves_samples, self.strategy.by_time, self.inner)

    @property
    def slots(self) -> Ints:
        """Slots of every device, `[D]`: as asked for, else as in the plan in force; 0 on dead devices."""
        slots: int | Ints | None = self._asked.slots
        redundant = self._asked.redundant
        before = None if self.previous is None else self.previous.placement
        if before is not None and slots is None and not redundant:
            slots = before.slots
        slots_D = np.zeros(self.request.cluster.num_devices, np.int64)
        extra = 0 if redundant == "auto" else redundant
        slots_D[self.alive] = slots_for(self.model.num_experts, len(self.alive), slots, redundant=extra)
        return slots_D

    @property
    def alive(self) -> list[int]:
        """The ranks that may hold experts."""
        return [rank for rank in range(self.request.cluster.num_devices) if rank not in self._asked.dead]

    @property
    def _asked(self) -> PlacementParams:
        """Parameters of the placement asked for: the usual ones where the strategy places no experts by slots."""
        return self.params if isinstance(self.params, PlacementParams) else PlacementParams()

    @property
    def placement(self) -> Placement:
        """The base's placement, contiguous without one."""
        if self.base is not None and self.base.placement is not None:
            return self.base.placement
        return today(self.model, self.request.cluster).journey.placement

    @property
    def evaluation_options(self) -> EvaluationOptions:
        """Options of how a plan of this task is judged."""
        index, request = self.index, self.request
        recorded = index.num_source_ranks == request.cluster.num_devices
        by_counts = isinstance(self.source, CountTrace) and not self.moves_samples
        size, derived = self.size, self._derives_steps
        return EvaluationOptions(
            unit=index.split_kind,
            phases=request.phases,
            use=self.use,
            as_prompts=as_prompts(index.phases, self.use),
            **{FIELDS[size.unit]: size.number} if derived else {},
            home="source_rank" if recorded else "none" if by_counts else "ordinal",
            step="derived" if derived else "recorded",
            engine_rule=self.engine_rule,
            waterfill=request.waterfill,
        )


def _judging(scene: Scene) -> Scene:
    """A scene with its last part alone, and the pairs of its steps, where they are counted."""
    alone = dataclasses.replace(scene, cohorts=scene.cohorts[-1:])
    alone.counted.extend(scene.counted[-1:])
    return alone
