"""Plans run for real: recorded steps through the MoE layers alone, on every rank, today and under each plan.

Legend: Q levels of a prediction; R rounds; W ways to run: today, then the plans.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from ...errors import InputError, UsageError
from ...files import check_target, sha256_file
from ...profilers.profile import Profile
from ...profilers.profile import load as load_profile
from ...profilers.stopwatch import Part
from ...profilers.world import run_world
from ...profilers.world.launch import found_launch
from ...runtime.plan import FileInput
from ...solvers.arrays import Floats
from ...traces.count_form import CountTrace, open_any
from ..evaluate.price import STEP
from ..loaded_plan import LoadedPlan, common_cluster, load_plans, made_with
from .doubts import doubts
from .model import bits_for
from .ranks import TURNS, TYPES, Timed, Way, Work, run
from .result import Finished, Ran, Replayed, Span, beside
from .steps import Predicted, Stage

TIMEOUT_S = 600.0
TODAY = "today"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Plans, trace and settings of a replay.

    Parameters
    ----------
    trace
        A directory, a file or a URI: of tokens; of counts by step and source rank, too, whose pairs then run as tokens
        of their own.
    profile
        What predicts the seconds; None: only copies are predicted.
    tokens
        Of a step, in whole samples that no plan was fitted to where there are any, or as many decoded sequences; None:
        256 a device, or the steps that were recorded.
    backward
        Whether every run computes gradients, too; it does where replicas follow the load.
    rounds
        Of runs, each of today and of all plans, forth and back. Recorded steps take turns; where replicas follow the
        load, they run one after another, and there are no more rounds than steps.
    seed
        Of the weights.
    """

    plans: Sequence[Path]
    trace: str
    profile: Path | None = None
    tokens: int | None = None
    backward: bool = False
    rounds: int = 10
    seed: int = 0


def replay(
    asked: Experiment,
    *,
    device: str = "cpu",
    will_keep: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Finished | None:
    """Run recorded steps under plans on ranks of this machine, or on those that were launched.

    Parameters
    ----------
    will_keep
        Refuse plans beside which nothing can be written (`result.beside`).

    Returns
    -------
    Finished or None
        None on ranks other than 0 of a launched world.

    Raises
    ------
    RankError
        A rank was lost; other errors are those of `prepare`.
    """
    launch = found_launch()
    if will_keep and (launch is None or launch.rank == 0):
        for plan in asked.plans:
            check_target(beside(plan))
    prepared = prepare(asked, on_progress)
    size = prepared.stage.scene.cluster.num_devices
    if launch is not None and launch.size != size:
        raise UsageError(f"{launch.size} ranks were started for plans of {size} devices; start one for each device")
    if launch is None and device == "cpu":
        _check_memory(prepared)
    ranks = run_world(size, run, prepared.work, device=device, timeout_s=TIMEOUT_S, on_progress=on_progress)
    if ranks is None:
        return None
    stage, profile = prepared.stage, asked.profile
    return Finished(
        prepared.told(ranks),
        {plan.path: plan.plan for plan in stage.plans},
        trace=FileInput(path=asked.trace, sha256=stage.source.sha256),
        profile=None if profile is None else FileInput(path=str(profile), sha256=sha256_file(profile)),
        environment=ranks[0].environment,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A replay before its ranks run."""

    stage: Stage
    work: Work  #: Of every rank: `run`
    predicted: Sequence[Predicted]  #: Of today, then of each plan
    profile: Profile | None = None
    tokens: int | None = None  #: Of a step, as asked for

    def told(self, ranks: Sequence[Timed]) -> Replayed:
        """What ranks measured, beside what was predicted."""
        work, record_steps = self.work, self.stage.scene.record_steps
        seconds_RW2 = np.max([rank.seconds for rank in ranks], axis=0)
        again = Span.of(seconds_RW2[:, 0, 1] / seconds_RW2[:, 0, 0])
        own_RW = seconds_RW2.mean(axis=2)
        moves_RW = np.max([rank.moves for rank in ranks], axis=0) / record_steps
        both_RW = own_RW + moves_RW.mean(axis=0)
        ways, plans = list[Ran](), {plan.path: plan for plan in self.stage.plans}
        lacking = partial(
            doubts, stage=self.stage, ranks=ranks[0].environment, tokens=self.tokens, profile=self.profile
        )
        for way, name in enumerate(work.ways):
            levels = {metric: of_steps[:, work.steps] for metric, of_steps in self.predicted[way].items()}
            ways.append(
                Ran(
                    name=name,
                    step=Span.of(both_RW[:, way]),
                    exchange_s=_lapped(ranks, way, "dispatch") + _lapped(ranks, way, "combine"),
                    experts_s=_lapped(ranks, way, "experts"),
                    copies=float(np.sum([rank.copies[:, way] for rank in ranks], axis=0).mean()),
                    gain=Span.of(1 - both_RW[:, way] / both_RW[:, 0]),
                    predicted={metric: _span(of_rounds) for metric, of_rounds in levels.items()},
                    measured_s=tuple((own_RW + moves_RW)[:, way].tolist()),
                    predicted_s=tuple(levels[STEP][1].tolist()) if STEP in levels else (),
                    doubts=tuple(lacking(plans[name])) if name in plans else (),
                )
            )
        return Replayed(
            num_tokens=len(work.recorded.ids),
            steps=tuple(work.steps),
            seen=self.stage.seen,
            backward=work.backward,
            noise=float(max(abs(again.low - 1), abs(again.high - 1))),
            ways=tuple(ways),
        )


def prepare(asked: Experiment, on_progress: Callable[[str], None] = lambda _: None) -> Prepared:
    """Everything about a replay that needs no rank.

    Raises
    ------
    UsageError
        A plan that does not run on these layers, or not beside the others: of other clusters than the first, or not
        trained.
    InputError
        Sizes of the model are unknown, or the trace does not hold what a plan needs.
    """
    on_progress("reading the trace")
    loaded, source = load_plans(asked.plans), open_any(asked.trace)
    profile = None if asked.profile is None else load_profile(asked.profile)
    known = asked.profile is not None and made_with(loaded[0].plan, asked.profile)
    described = None if profile is None or known else profile.cluster
    follows = any(plan.plan.decisions.rebalancing is not None for plan in loaded)
    backward = asked.backward or follows
    loaded = [replace(plan, by_counts=isinstance(source, CountTrace)) for plan in loaded]
    for plan in loaded:
        plan.check_model(source)
        _check(plan, backward=backward)
    stage = Stage.of(
        loaded,
        source,
        common_cluster(loaded, described, timed=True),
        profile=profile,
        tokens=asked.tokens,
        most_steps=asked.rounds,
        backward=backward,
        seed=asked.seed,
    )
    rounds = stage.num_steps if follows else asked.rounds
    steps = [number % stage.num_steps for number in range(rounds)]
    _check_sizes(stage)
    ways = {TODAY: Way(stage.today)}
    for plan, schedule in zip(loaded, stage.schedules(TURNS), strict=True):
        ways[plan.path] = Way(plan.path, schedule)
    work = Work(stage.recorded, stage.scene.model, ways, backward, steps, asked.seed, stage.embeddings)
    on_progress("predicting")
    return Prepared(stage, work, stage.predicted(), profile, asked.tokens)


def _check(plan: LoadedPlan, *, backward: bool) -> None:
    """Refuse a plan that does not run on layers alone."""
    rebalancing = plan.plan.decisions.rebalancing
    if rebalancing is not None and rebalancing.method == "paper":
        raise UsageError(
            f"{plan.path}: rebalancing by method paper splits steps by its own rule, and the runtime exactly; give a"
            " plan of solve --strategy flexmoe without --method"
        )
    if backward and plan.plan.dispatch_model == "coherent":
        raise UsageError(
            f"{plan.path}: coherent tokens are not trained; leave --backward and plans whose replicas follow the load"
            " out"
        )


def _check_sizes(stage: Stage) -> None:
    """Refuse a model whose layers cannot be built, or cannot tell the tokens apart."""
    spec, path = stage.scene.model, stage.source.path
    if spec.hidden_size is None or spec.ffn_size is None or spec.dtype_bytes not in TYPES:
        raise InputError(
            f"{path}: layers of hidden size {spec.hidden_size}, expert FFN size {spec.ffn_size} and"
            f" {spec.dtype_bytes} bytes an element; expected all three, the last 2 or 4: import the trace with them"
        )
    if spec.hidden_size <= (bits := bits_for(number := len(stage.recorded.ids))):
        raise InputError(
            f"{path}: {number:,} tokens in layers of hidden size {spec.hidden_size}, whose first {bits} elements would"
            " tell them apart; expected fewer tokens: --tokens-per-step, or --rounds"
        )


def _check_memory(prepared: "Prepared") -> None:
    """Refuse experts that this machine's memory does not hold, when it is to run all ranks."""
    stage, each = prepared.stage, prepared.stage.scene.model.expert_bytes or 0
    slots = sum(int(one.journey.placement.slots.sum()) for one in stage.contenders)
    needed = slots * stage.scene.model.num_layers * each * (1 + prepared.work.backward)  # gradients are as large
    if needed > (memory := memory_bytes()):
        what = "weights and gradients" if prepared.work.backward else "weights"
        raise UsageError(
            f"{what} of {needed / 1e9:,.1f} GB, of today and each plan together, for {memory / 1e9:,.1f} GB of memory"
            " here; expected ranks on the machines of the cluster (torchrun or srun), or fewer plans at a time"
        )


def memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _span(levels: Floats) -> Span:
    """The mean over rounds of a prediction, `[Q, R]`."""
    low, middle, high = levels.mean(axis=1).tolist()
    return Span(middle, low, high)


def _lapped(ranks: Sequence[Timed], way: int, part: Part) -> float:
    """Seconds of a step in a part: the slowest rank of each lap, the median of rounds."""
    rounds = zip(*([row[way][part] for row in rank.laps] for rank in ranks), strict=True)
    return float(np.median([np.max(laps, axis=0).sum() for laps in rounds]))
