"""Plans run for real: a recorded step through the MoE layers alone, on every rank, today and under each plan.

Legend: N tokens of the step, T of them here; I samples; S positions; L MoE layers; K experts per token; D ranks; R
rounds, each of which runs every plan twice, forth and back; W ways to run: today, then the plans.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ...errors import InputError, UsageError
from ...profilers.measurement import median_interval
from ...profilers.profile import load as load_profile
from ...profilers.stopwatch import Laps, Part, stopwatch
from ...profilers.world import World, run_world
from ...profilers.world.launch import found_launch
from ...runtime import load_plan, parallelize
from ...runtime.decisions import Decisions
from ...runtime.plan import Inputs, Plan
from ...solvers.arrays import Ints
from ...traces.model import ModelSpec
from ...traces.reader import Trace, open_trace
from ..evaluate.evaluate import evaluate
from ..evaluate.journey import Contender, today
from ..evaluate.metrics import EXCHANGE, EXPERTS
from ..evaluate.price import STEP
from ..evaluate.scene import BACKWARD, Passes, Scene
from ..evaluate.step_size import StepSize
from ..evaluate.units import SampleIndex, index_samples
from ..loaded_plan import LoadedPlan, common_cluster, common_passes, known_model, load_plans
from .model import LayersAlone

TIMEOUT_S = 600.0
TODAY = "today"
TYPES = {2: torch.bfloat16, 4: torch.float32}  # of elements, by bytes
USUAL_TOKENS = 256  # of a rank


@dataclass(frozen=True, slots=True)
class Span:
    """A median and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """The median of samples."""
        return cls(float(np.median(samples)), *median_interval(samples))


@dataclass(frozen=True, slots=True)
class Ran:
    """A way to run the step: seconds measured, those of the slowest rank, and predicted."""

    name: str
    step: Span
    #: exchange_s, experts_s: medians of the forward's dispatches and combines, and of its experts, each after a barrier
    exchange_s: float
    experts_s: float
    gain: Span  #: Share of today's step that it saves, round by round
    #: step_s, exchange_s and experts_s of the MoE layers as the profile has them; empty without one
    predicted: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step that was run."""

    num_tokens: int
    num_samples: int
    seen: bool  #: Whether plans were fitted to the samples
    backward: bool
    noise: float  #: How far today's second run of a round is from its first, as a share: the bound of its interval
    ways: Sequence[Ran]  #: Today's first

    @property
    def gaining(self) -> list[str]:
        """The plans whose gain is above the noise."""
        return [way.name for way in self.ways[1:] if way.gain.low > self.noise]


class Recorded(NamedTuple):
    """The tokens of a step, by sample and position."""

    ids: NDArray[np.uint16]  #: `[N, L, K]`
    #: sample, position, home: of each, `[N]`; samples by their ids in the trace, the devices that they start on
    sample: Ints
    position: Ints
    home: Ints


class Work(NamedTuple):
    """Work of all ranks."""

    step: Recorded
    spec: ModelSpec
    plans: Mapping[str, Plan | str]  #: By way; a plan that was loaded by its path, for its sidecars
    backward: bool
    rounds: int
    seed: int


class Timed(NamedTuple):
    """Measurements of a rank: seconds of every run, `[R, W, 2]`, and laps by round and way."""

    seconds: NDArray[np.float64]
    laps: list[list[Laps]]


def replay(
    plans: Sequence[str | os.PathLike[str]],
    trace: str | os.PathLike[str],
    *,
    profile: str | os.PathLike[str] | None = None,
    tokens: int | None = None,
    backward: bool = False,
    rounds: int = 10,
    device: str = "cpu",
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Replayed | None:
    """Run a recorded step under plans on ranks of this machine, or on those that were launched.

    Parameters
    ----------
    trace
        Of tokens, in samples.
    profile
        What predicts the seconds; None: nothing is predicted.
    tokens
        Of the step, in whole samples that no plan was fitted to where there are any; None: 256 a device.
    backward
        Whether every run computes gradients, too.
    rounds
        Of runs, each of today and of all plans, forth and back.

    Returns
    -------
    Replayed or None
        None on ranks other than 0 of a launched world.

    Raises
    ------
    UsageError
        A plan that does not run on these layers: of other clusters than the first, one that follows the load of a
        training, or one whose rows stand for others; another number of ranks than devices.
    InputError
        Sizes of the model are unknown, or the trace has no samples.
    RankError
        A rank was lost.
    """
    loaded = load_plans(plans)
    measured, source = None if profile is None else load_profile(profile), open_trace(trace)
    cluster = common_cluster(loaded, None if measured is None else measured.cluster, timed=True)
    launch = found_launch()
    if launch is not None and launch.size != cluster.num_devices:
        raise UsageError(
            f"{launch.size} ranks were started for plans of {cluster.num_devices} devices; start one for each device"
        )
    for plan in loaded:
        plan.check_model(source)
        _check(plan, backward=backward)
    spec = known_model(source.meta.model, [one.plan for one in loaded])
    if spec.hidden_size is None or spec.ffn_size is None or spec.dtype_bytes not in TYPES:
        raise InputError(
            f"{trace}: layers of hidden size {spec.hidden_size}, expert FFN size {spec.ffn_size} and"
            f" {spec.dtype_bytes} bytes an element; expected all three, the last 2 or 4: import the trace with them"
        )
    index = index_samples(source)
    unseen_U = np.logical_and.reduce([plan.unseen(index, source.sha256, ()) for plan in loaded])
    chosen_U = _chosen(index, unseen_U if unseen_U.any() else ~unseen_U, tokens or USUAL_TOKENS * cluster.num_devices)
    size = StepSize("samples", int(chosen_U.sum()))
    scene = Scene.of(
        source,
        index,
        [chosen_U],
        cluster,
        size=size,
        profile=measured,
        model=spec,
        seed=seed,
        passes=_passes(loaded, backward=backward),
    )
    as_today = Plan.make(
        strategies=(), seed=0, cluster=cluster, model=spec, inputs=Inputs(), decisions=Decisions(dispatch="standard")
    )
    ways: dict[str, Plan | str] = {TODAY: as_today, **{plan.path: plan.path for plan in loaded}}
    work = Work(_recorded(source, index, scene), spec, ways, backward, rounds, seed)
    ranks = run_world(cluster.num_devices, _on_rank, work, device=device, timeout_s=TIMEOUT_S, on_progress=on_progress)
    if ranks is None:
        return None
    predicted = _predicted(scene, [today(spec, cluster), *(plan.contender for plan in loaded)])
    return _told(work, ranks, predicted, num_samples=size.number, seen=not unseen_U.any())


def _check(plan: LoadedPlan, *, backward: bool) -> None:
    """Refuse a plan that does not run on layers alone, for one step."""
    decisions = plan.plan.decisions
    if decisions.rebalancing is not None:
        raise UsageError(f"{plan.path}: its replicas follow the load of many steps; expected a plan for one step")
    if decisions.condensation is not None:
        raise UsageError(f"{plan.path}: its rows stand for others by their contents, which no trace of routing holds")
    if backward and plan.plan.dispatch_model == "coherent":
        raise UsageError(f"{plan.path}: coherent tokens are not trained; leave --backward out")


def _passes(plans: Sequence[LoadedPlan], *, backward: bool) -> Passes | None:
    """The passes that run: as plans have them, less a backward pass that does not."""
    planned = common_passes(plans)
    if not backward:
        return planned and replace(planned, backward=0.0)
    return planned if planned is not None and planned.backward else Passes(BACKWARD, full_duplex=False)


def _chosen(index: SampleIndex, among_U: NDArray[np.bool_], tokens: int) -> NDArray[np.bool_]:
    """Mask of the first samples of so many tokens, one at least."""
    total_U = np.cumsum(np.where(among_U, index.unit_tokens, 0))
    before_U = total_U - np.where(among_U, index.unit_tokens, 0)
    return np.asarray(among_U & (before_U < tokens))


def _recorded(trace: Trace, index: SampleIndex, scene: Scene) -> Recorded:
    """The tokens of the scene's one step."""
    (cohort,), parts = scene.cohorts, list[tuple[Any, ...]]()
    for batch, unit_T in index.batches(trace, None):
        at = cohort.locate(batch, unit_T)
        parts.append((batch.ids[at.rows], unit_T[at.rows], at.position, at.home))
    ids, sample, position, home = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((position, sample))
    return Recorded(ids[order], sample[order].astype(np.int64), position[order], home[order])


def _on_rank(world: World, work: Work) -> Timed:
    """Run all ways in turn on this rank's samples."""
    device = torch.device(world.device)
    calls = list[Callable[[], object]]()
    for one in work.plans.values():
        plan = load_plan(one) if isinstance(one, str) else one
        ids_NLK, dtype = torch.from_numpy(work.step.ids.astype(np.int32)), TYPES[work.spec.dtype_bytes or 4]
        model = LayersAlone(work.spec, ids_NLK, dtype).to(device).train(mode=work.backward)
        spread = parallelize(model, plan)
        model.fill(work.seed + world.rank)
        inputs = [one.to(device) for one in _inputs(work.step, world.rank, flat=plan.dispatch_model == "standard")]
        calls.append(partial(_run, spread, inputs, backward=work.backward))
        calls[-1]()
        world.report("ready")
    order, seconds = list(range(len(calls))), np.zeros((work.rounds, len(calls), 2))
    laps = list[list[Laps]]()
    for number in range(work.rounds):
        for turn, ways in enumerate((order, order[::-1])):
            for way in ways:
                seconds[number, way, turn] = _seconds(calls[way], device)
        laps.append([_laps(call) for call in calls])
        world.report(f"round {number + 1} of {work.rounds}")
    return Timed(seconds, laps)


def _inputs(step: Recorded, rank: int, *, flat: bool) -> list[Tensor]:
    """Numbers of this rank's tokens, the samples that they take turns by, and which are real.

    A token that returns is a sample of its own, so that nothing is padded; others are beside those of their sample.
    """
    (number_T,) = np.nonzero(step.home == rank)
    if flat:
        turn_T = step.sample[number_T] + step.position[number_T]
        return [torch.from_numpy(number_T)[:, None], torch.from_numpy(turn_T)]
    samples, place_T, count_B = np.unique(step.sample[number_T], return_inverse=True, return_counts=True)
    column_T = np.arange(len(number_T)) - np.repeat(np.cumsum(count_B) - count_B, count_B)
    tokens_BS = np.zeros((len(samples), int(count_B.max(initial=1))), np.int64)
    real_BS = np.zeros(tokens_BS.shape, np.bool_)
    tokens_BS[place_T, column_T], real_BS[place_T, column_T] = number_T, True
    return [torch.from_numpy(one) for one in (tokens_BS, samples, real_BS)]


def _run(spread: Any, inputs: Sequence[Tensor], *, backward: bool) -> None:
    with contextlib.nullcontext() if backward else torch.inference_mode():
        y = spread(*inputs)
        if backward:
            y.sum().backward()


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _laps(call: Callable[[], object]) -> Laps:
    with stopwatch() as laps:
        call()
    return laps


def _predicted(scene: Scene, contenders: Sequence[Contender]) -> list[dict[str, float]]:
    """Predicted seconds of the MoE layers alone, a contender each."""
    if scene.costs is None:
        return [{} for _ in contenders]
    alone = replace(scene, costs=replace(scene.costs, attention=None))
    rows = evaluate(alone, contenders).evaluation.fit.contenders
    return [
        {name: row.metrics[name].value for name in (STEP, EXCHANGE, EXPERTS) if name in row.metrics} for row in rows
    ]


def _told(
    work: Work, ranks: Sequence[Timed], predicted: Sequence[Mapping[str, float]], *, num_samples: int, seen: bool
) -> Replayed:
    seconds_RW2 = np.max([rank.seconds for rank in ranks], axis=0)
    again = Span.of(seconds_RW2[:, 0, 1] / seconds_RW2[:, 0, 0])
    both_RW = seconds_RW2.mean(axis=2)
    ways = [
        Ran(
            name,
            Span.of(both_RW[:, way]),
            _lapped(ranks, way, "dispatch") + _lapped(ranks, way, "combine"),
            _lapped(ranks, way, "experts"),
            Span.of(1 - both_RW[:, way] / both_RW[:, 0]),
            predicted[way],
        )
        for way, name in enumerate(work.plans)
    ]
    noise = max(abs(again.low - 1), abs(again.high - 1))
    return Replayed(len(work.step.ids), num_samples, seen, work.backward, noise, ways)


def _lapped(ranks: Sequence[Timed], way: int, part: Part) -> float:
    """Seconds of a step in a part: the slowest rank of each lap, the median of rounds."""
    laps_DRN = np.array([[row[way][part] for row in rank.laps] for rank in ranks])
    return float(np.median(laps_DRN.max(axis=0).sum(axis=1)))
