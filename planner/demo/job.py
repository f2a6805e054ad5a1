"""The main job on the embedded model: profile, record, solve, apply, run, and hold the run against the prediction.

Legend: B a rank's samples; I samples; S positions; V vocabulary; L MoE layers; T tokens; K experts a token; D ranks;
R repeats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...files import check_target
from ...profilers import harness, measure, profile
from ...profilers.cases.routed_block import RoutedBlock
from ...profilers.cases.routed_exchange import RoutedExchange
from ...profilers.cluster import Cluster
from ...profilers.harness import Place, Start, Step
from ...profilers.log import Log
from ...profilers.measurement import Measurement, Size
from ...profilers.profile import Profile
from ...profilers.world import World, run_world
from ...runtime import parallelize
from ...runtime import plan as plans
from ...runtime.active import activate
from ...runtime.decisions import DispatchModel
from ...runtime.engine.stopwatch import Laps, stopwatch
from ...runtime.engine.traffic import Traffic
from ...runtime.plan import Plan
from ...solvers.outcome import Status
from ...traces.model import EXPERT_MATRICES
from ...traces.reader import Trace
from ..certify import Certificate, certify
from ..evaluate.evaluate import evaluate
from ..evaluate.journey import Contender, Journey
from ..evaluate.scene import Scene
from ..evaluate.splits import index_units
from ..evaluate.steps import StepSize
from ..request import Request
from ..solve import solve
from .model import ModelConfig, load_embedded
from .text import SAMPLE_TOKENS, other_text, record_embedded, record_text, samples

NUM_RANKS = 4
TIMEOUT_S = 120.0
ROUNDS = 6  # of timed forwards, between which what they are predicted from is measured
ROUND_S = 5.0  # of these measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one run, over all ranks."""

    name: str
    dispatch_model: DispatchModel
    largest_difference: float  #: Between any logit and the single process's
    misrouted: int  #: Choices that differ from those of the single process, of all tokens, layers and K
    copies: float  #: Copies that crossed devices, a token and layer
    #: payload_bytes, kv_bytes, return_bytes: bytes that crossed devices in the whole run: hidden vectors, K and V, and
    #: tokens going home after the last layer of a coherent forward
    payload_bytes: int
    kv_bytes: int
    return_bytes: int
    balance: float  #: Token-expert pairs of the busiest device over the mean, mean over layers
    #: exchange_s, experts_s: seconds of a forward's dispatches and combines, and of its experts: the slowest rank of
    #: each lap, the median over `ROUNDS` forwards, summed over layers
    exchange_s: float
    experts_s: float


@dataclass(frozen=True, slots=True)
class Demo:
    """Result of the demo: its files, runs and predictions."""

    folder: Path
    profile: Profile
    plan: Plan  #: ExFlow's, coherent, fitted and judged on one half of the held-out text
    certificate: Certificate  #: Its recount
    runs: list[Measured]  #: Contiguous and plan, coherent and standard, measured on the other half
    #: Each run as a replay of the other half's routing predicts it; seconds where the profile has them
    replayed: Sequence[plans.Contender]
    #: num_samples, num_tokens: of the other half
    num_samples: int
    num_tokens: int


class Trial(NamedTuple):
    """A plan to run under a dispatch model, by the name it has on the screen."""

    name: str
    dispatch_model: DispatchModel
    plan: Plan


class Share(NamedTuple):
    """Measurements of one trial on one rank, with one entry of `laps` per round."""

    largest_difference: float
    misrouted: int
    traffic: Traffic
    laps: list[Laps]


class BlockOfModel(RoutedBlock):
    """The routed block at the shape of the embedded model.

    Its experts have two matrices, those of the case gate, up and down: two thirds of the FFN size are as much work.
    """

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """From 8,192 to 32,768 token-expert pairs of a device."""
        config = ModelConfig()
        shape = {
            "experts": config.num_experts // NUM_RANKS,
            "hidden": config.hidden_size,
            "ffn": timed_ffn(config.ffn_size),
        }
        return [{"tokens": 2**power, **shape} for power in (13, 14, 15)]


class ExchangeOfModel(RoutedExchange):
    """The exchanges of some megabytes through a port."""

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """From 2 to 16 MiB."""
        return [{"bytes": 2**power, "moves": moves} for power in (21, 23, 24) for moves in (0, 1)]


PREDICTING = (BlockOfModel(), ExchangeOfModel())


class Ran(NamedTuple):
    """The trials on one rank, and the reports of what was measured between them, which rank 0 has."""

    shares: list[Share]
    reports: list[Start | Step]


def run_demo(folder: Path, *, on_progress: Callable[[str], None] = lambda _: None) -> Demo:
    """Run the whole chain in a folder, which is missing or empty, else UsageError; after Ctrl-C no plan is active."""
    check_target(folder, directory=True)
    measured = measure.measure(
        num_ranks=NUM_RANKS,
        device="cpu",
        grid="quick",
        on_progress=lambda step: on_progress(f"measuring {step.case}: {step.done} of {step.total} sizes"),
    )
    assert measured is not None  # not in a launched world
    if not measured.complete:
        raise KeyboardInterrupt  # Ctrl-C, which measuring answers with what it has
    profile.save(measured, folder / "profile.json")
    on_progress("recording the embedded model on text")
    record_embedded(record_text(), folder / "traces")
    on_progress("solving exflow")
    planned = _solve(folder, measured.cluster, "exflow")
    if any(outcome.status is Status.INTERRUPTED for outcome in planned.outcome.values()):
        raise KeyboardInterrupt
    plans.save(planned, folder / "plan.json")
    on_progress("certifying the plan")
    certificate = certify(planned, folder / "traces", folder / "profile.json")
    activate(folder / "plan.json", folder)
    contiguous = _solve(folder, measured.cluster, "contiguous")
    on_progress("recording other text in one process")
    other = record_embedded(other_text(), folder / "other-traces")
    models: tuple[DispatchModel, ...] = ("coherent", "standard")
    by_name = {"contiguous": contiguous, "plan": planned}
    trials = [Trial(name, model, plan) for model in models for name, plan in by_name.items()]
    tokens_IS = samples(other_text(), SAMPLE_TOKENS)
    ids_TLK = np.concatenate([batch.ids for batch in other.batches()])
    on_progress(f"running the model on {NUM_RANKS} processes")
    ranks = run_world(NUM_RANKS, _run_rank, (trials, tokens_IS, ids_TLK), timeout_s=TIMEOUT_S)
    assert ranks is not None  # the demo starts its own ranks
    runs = [_measured(trial, [rank.shares[i] for rank in ranks], tokens_IS.size) for i, trial in enumerate(trials)]
    beside = _profile_beside(ranks[0].reports)
    profile.save(beside, folder / "profile-beside-run.json")
    replayed = _replay(other, trials, beside)
    return Demo(folder, measured, planned, certificate, runs, replayed, len(tokens_IS), tokens_IS.size)


def timed_ffn(ffn_size: int) -> int:
    """The FFN size at which experts of three matrices have the multiply-adds of the embedded model's two."""
    return round(ffn_size * 2 / EXPERT_MATRICES)


def _solve(folder: Path, cluster: Cluster, strategy: str) -> Plan:
    return solve(
        Request.of(strategy=strategy, trace=str(folder / "traces"), cluster=cluster, profile=folder / "profile.json")
    )


def _run_rank(world: World, job: tuple[Sequence[Trial], NDArray[np.int64], NDArray[np.uint16]]) -> Ran:
    """Run trials on this rank's samples of a text, every D-th, and hold them against its routing in one process."""
    trials, tokens_IS, ids_TLK = job
    sample_B = torch.arange(world.rank, len(tokens_IS), world.size)
    tokens_BS, shares, reports = torch.from_numpy(tokens_IS)[sample_B], list[Share](), list[Start | Step]()
    with torch.inference_mode():
        expected_BSV = load_embedded()(tokens_BS)
        models = [parallelize(load_embedded(), trial.plan, dispatch=trial.dispatch_model) for trial in trials]
        for trial, model in zip(trials, models, strict=True):
            difference_BSV = (model(tokens_BS, sample_B) - expected_BSV).abs()
            misrouted = 0
            for layer, routed in enumerate(model.routed):
                token_T = (routed.sample * tokens_IS.shape[1] + routed.position).numpy()
                misrouted += int((routed.ids.numpy() != ids_TLK[token_T, layer]).sum())
            largest = float(difference_BSV.max()) if difference_BSV.numel() else 0.0
            shares.append(Share(largest, misrouted, model.traffic, []))
            world.report(trial.name)
        for _ in range(ROUNDS):
            asked = harness.Request(PREDICTING, "quick", _swept(reports), ROUND_S)
            harness.measure_cases(replace(world, report=reports.append), asked)
            for share, model in zip(shares, models, strict=True):
                with stopwatch() as laps:
                    model(tokens_BS, sample_B)
                share.laps.append(laps)
            world.report("round")
    return Ran(shares, reports)


def _swept(reports: Sequence[Start | Step]) -> frozenset[Place]:
    """The sizes of the sweep that is under way: a round goes on where the one before it ended."""
    places = [report.place for report in reports if isinstance(report, Step)]
    size = next((len(report.grid) for report in reports if isinstance(report, Start)), 1)
    return frozenset(places[len(places) // size * size :])


def _profile_beside(reports: Sequence[Start | Step]) -> Profile:
    """The profile of what was measured between forwards, the samples of all rounds together."""
    log = Log(PREDICTING, grid="quick", earlier=None, on_progress=None, on_profile=None)
    samples_s = dict[Place, list[float]]()
    for report in reports:
        if isinstance(report, Step):
            of_place = samples_s.setdefault(report.place, [])
            of_place += report.measurement.samples_s
            one = report.measurement
            report = replace(report, measurement=Measurement.of(one.size, one.work, of_place))
        log.receive(report)
    return log.profile(complete=True)


def _measured(trial: Trial, shares: Sequence[Share], num_tokens: int) -> Measured:
    def seconds(part: Literal["dispatch", "experts", "combine"]) -> float:
        laps_DRL = np.array([[laps[part] for laps in share.laps] for share in shares])
        return float(np.median(laps_DRL.max(axis=0), axis=0).sum())

    traffic = [share.traffic for share in shares]
    loads_DL = np.array([one.loads for one in traffic], dtype=np.float64)
    return Measured(
        name=trial.name,
        dispatch_model=trial.dispatch_model,
        largest_difference=max(share.largest_difference for share in shares),
        misrouted=sum(share.misrouted for share in shares),
        copies=sum(one.copies for one in traffic) / (num_tokens * trial.plan.model.num_layers),
        payload_bytes=sum(one.payload_bytes for one in traffic),
        kv_bytes=sum(one.kv_bytes for one in traffic),
        return_bytes=sum(one.return_bytes for one in traffic),
        balance=float((loads_DL.max(axis=0) / loads_DL.mean(axis=0)).mean()),
        exchange_s=seconds("dispatch") + seconds("combine"),
        experts_s=seconds("experts"),
    )


def _replay(trace: Trace, trials: Sequence[Trial], profile: Profile) -> Sequence[plans.Contender]:
    """Replay every run on a trace that is one step."""
    index, cluster, model = index_units(trace), trials[0].plan.cluster, trace.meta.model
    every_U = np.ones(len(index.unit_ids), np.bool_)
    timed = replace(model, ffn_size=timed_ffn(model.ffn_size or 0))
    scene = Scene.of(
        trace, index, [every_U], cluster, size=StepSize("samples", len(every_U)), profile=profile, model=timed
    )
    contenders = []
    for trial in trials:
        assert trial.plan.placement is not None
        contenders.append(Contender(trial.name, Journey(trial.dispatch_model, trial.plan.placement)))
    return evaluate(scene, contenders).evaluation.fit.contenders
