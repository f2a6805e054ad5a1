"""The demo: a plan for published hardware, then the embedded model run on processes of this machine.

Every run is held against a single process, and against what a replay of the text's routing predicts.

Legend: B a rank's samples; I samples; S positions; V vocabulary; L MoE layers; T tokens; K experts per token; D ranks;
R rounds; N laps of a forward.
"""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...files import check_target
from ...profilers import harness, profile
from ...profilers.cases.exchange import AllToAll
from ...profilers.cases.routed_block import RoutedBlock
from ...profilers.cases.routed_exchange import RoutedExchange, ways
from ...profilers.cluster import Cluster
from ...profilers.harness import Interleaved, Start, Step
from ...profilers.log import Log
from ...profilers.measurement import Size
from ...profilers.profile import Profile
from ...profilers.stopwatch import Laps, Part, stopwatch
from ...profilers.world import World, run_world
from ...profilers.world.local_ranks import interrupts_blocked
from ...runtime import load_plan, parallelize
from ...runtime import plan as plans
from ...runtime.decisions import Decisions, PipelineDecision
from ...runtime.engine.traffic import Traffic
from ...runtime.plan import Inputs, Plan
from ...solvers.precompile import GROUPS
from ...traces.model import EXPERT_MATRICES, ModelSpec
from ...traces.reader import Trace
from ..evaluate.evaluate import evaluate
from ..evaluate.journey import Contender, journey_of
from ..evaluate.scene import Passes, Scene
from ..evaluate.step_size import StepSize
from ..evaluate.trips import COUNT_BYTES
from ..evaluate.units import index_samples
from ..request import Request
from ..solve import make
from .model import ModelConfig, load_embedded
from .published import plan_published
from .text import SAMPLE_TOKENS, other_text, record_embedded, record_text, samples

CLUSTER = Cluster(1, 4)
CHUNKS = 2  # of every layer in the plan of a pipeline
SEARCH_S = 1.0
TIMEOUT_S = 120.0
RUN_SAMPLES = 64  # of the text
KEPT_BYTES = 2**28  # of memory that a rank keeps, more than its forwards need
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # options of mallopt(3)
ROUNDS = 6  # of timed forwards


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Measurements of one run, over all ranks."""

    name: str
    largest_difference: float  #: Between any logit and the single process's
    misrouted: int  #: Choices that differ from those of the single process, of all tokens, layers and K
    copies: int  #: Copies that crossed devices
    #: payload_bytes, kv_bytes: bytes that crossed devices in the whole run: hidden vectors, K and V
    payload_bytes: int
    kv_bytes: int
    #: exchange_s, experts_s: seconds of a forward's dispatches and combines, and of its experts: the slowest rank of
    #: each lap, summed by layer, the median over `ROUNDS` forwards, summed over layers
    exchange_s: float
    experts_s: float


@dataclass(frozen=True, slots=True)
class Demo:
    """Result of the demo: its files, plans, runs and predictions."""

    folder: Path
    prefill: Plan
    decode: Plan
    runs: list[RunFigures]  #: Of today, then of each plan
    #: Each run as a replay of the text's routing predicts it; seconds from what was measured between the forwards
    replayed: Sequence[plans.Contender]
    num_samples: int
    num_tokens: int
    runs_model: ModelSpec  #: The model that ran


class Trial(NamedTuple):
    """A plan to run, by the name it has on the screen."""

    name: str
    path: Path


class RankFigures(NamedTuple):
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
        """Sizes from 2,048 to 8,192 token-expert pairs: those of a chunk's busiest device, and of a layer's."""
        config = ModelConfig()
        shape = {
            "experts": config.num_experts // CLUSTER.num_devices,
            "hidden": config.hidden_size,
            "ffn": timed_ffn(config.ffn_size),
        }
        return [{"tokens": 2**power, **shape} for power in (11, 12, 13)]


class ExchangeOfModel(RoutedExchange):
    """Exchanges of some megabytes per rank; only where tokens move on does a rank keep more than an even share."""

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """Sizes from 1 to 3 MiB: those of a chunk's busiest device, and of a layer's."""
        _, *chosen = ways(world.size)
        return [{"bytes": number << 20, **way} for number in (1, 2, 3) for way in chosen]


class AgreementOnCounts(AllToAll):
    """All-to-alls of a few int64 per rank: those of a layer's counts."""

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """One number to each rank, and as many as where tokens move on."""
        return [{"bytes": COUNT_BYTES * number} for number in (world.size, 2 * world.size**2)]


PREDICTING = (BlockOfModel(), ExchangeOfModel(), AgreementOnCounts())


class Job(NamedTuple):
    """Work of all ranks: trials on the tokens of a text, `[I, S]`, whose experts are `ids`, `[T, L, K]`."""

    trials: Sequence[Trial]
    tokens: NDArray[np.int64]
    ids: NDArray[np.uint16]
    rounds: int  #: Of timed forwards


class RankResult(NamedTuple):
    """The trials on one rank, and the reports of what was measured between them."""

    figures: list[RankFigures]
    reports: list[Start | Step]


def run_demo(folder: Path, *, on_progress: Callable[[str], None] = lambda _: None) -> Demo:
    """Run both halves in a folder, which is missing or empty, else UsageError; it is gone where they do not end."""
    check_target(folder, directory=True)
    try:
        return _both_halves(folder, partial(_counted, on_progress))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _both_halves(folder: Path, say: Callable[[int, str], None]) -> Demo:
    say(1, "compiling what solves: this is kept")
    compile_solvers()
    with ThreadPoolExecutor(1) as pool:  # most of either half keeps one core busy
        local = pool.submit(_plan_embedded, folder)
        prefill, decode = plan_published(folder, partial(say, 2))
        say(3, "recording the embedded model on text, and planning for it")
        tokens_IS, other, trials = local.result()
    ids_TLK = np.concatenate([batch.ids for batch in other.batches()])
    say(4, f"running the model on {CLUSTER.num_devices} processes as today and under {len(trials) - 1} plans")
    ranks = run_world(CLUSTER.num_devices, _run_rank, Job(trials, tokens_IS, ids_TLK, ROUNDS), timeout_s=TIMEOUT_S)
    assert ranks is not None  # the demo starts its own ranks
    beside = _profile_beside(ranks[0].reports)
    profile.save(beside, folder / "profile-beside-run.json")
    model = other.meta.model
    runs = [_measured(trial, [rank.figures[i] for rank in ranks], model.num_layers) for i, trial in enumerate(trials)]
    replayed = _replay(other, trials, beside)
    return Demo(folder, prefill, decode, runs, replayed, len(tokens_IS), tokens_IS.size, model)


def compile_solvers() -> None:
    """Compile the solvers' inner loops, a process for each half of them; nothing is compiled twice on a machine."""
    command = [sys.executable, "-m", "moeplan.solvers.precompile"]
    processes = list[subprocess.Popen[bytes]]()
    try:
        with interrupts_blocked():
            processes += [subprocess.Popen([*command, group]) for group in GROUPS]
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.kill()


def timed_ffn(ffn_size: int) -> int:
    """The FFN size at which experts of three matrices have the multiply-adds of the embedded model's two."""
    return round(ffn_size * 2 / EXPERT_MATRICES)


def _counted(on_progress: Callable[[str], None], number: int, words: str) -> None:
    on_progress(f"{number} of 4: {words}")


def _plan_embedded(folder: Path) -> tuple[NDArray[np.int64], Trace, list[Trial]]:
    """Samples of a text, `[I, S]`, the embedded model's routing on them, and plans by its routing on another text."""
    record_embedded(record_text(), folder / "traces")
    text = other_text()[: RUN_SAMPLES * SAMPLE_TOKENS]
    other = record_embedded(text, folder / "other-traces")
    return samples(text, SAMPLE_TOKENS), other, _trials(folder)


def _trials(folder: Path) -> list[Trial]:
    """Plans by the embedded model's routing: today's, a placement, a pipeline, a sample policy."""
    asked: dict[str, dict[str, Any]] = {
        "today": {"strategy": "contiguous"},
        "placement (exflow, coherent)": {"strategy": "exflow", "time_limit_s": SEARCH_S},
        "samples (netmoe)": {"strategy": "netmoe", "method": "sum"},
    }
    trials = []
    for name, settings in asked.items():
        path = folder / f"{name.split()[0]}.json"
        made = make(Request.of(trace=str(folder / "traces"), cluster=CLUSTER, **settings))
        made.save(path)
        trials.append(Trial(name, path))
    model = made.plan.model
    decisions = Decisions(
        pipeline=PipelineDecision(forward=(CHUNKS,) * model.num_layers, backward=None), dispatch="standard"
    )
    piped = Plan.make(strategies=(), seed=0, cluster=CLUSTER, model=model, inputs=Inputs(), decisions=decisions)
    plans.save(piped, folder / "pipeline.json")
    return [*trials[:2], Trial(f"pipeline ({CHUNKS} chunks)", folder / "pipeline.json"), trials[2]]


def _run_rank(world: World, job: Job) -> RankResult:
    """Run trials on this rank's samples of a text, every D-th, and hold them against its routing in one process."""
    trials, tokens_IS, ids_TLK, rounds = job
    _keep_memory()
    sample_B = torch.arange(world.rank, len(tokens_IS), world.size)
    tokens_BS, figures = torch.from_numpy(tokens_IS)[sample_B], list[RankFigures]()
    with torch.inference_mode():
        expected_BSV = load_embedded()(tokens_BS)
        models = [parallelize(load_embedded(), load_plan(trial.path)) for trial in trials]
        for trial, model in zip(trials, models, strict=True):
            logits_BSV = model(tokens_BS, sample_B)
            difference_BSV = (logits_BSV - model.follow(expected_BSV)).abs()  # of the samples that are here now
            misrouted = 0
            for layer, routed in enumerate(model.routed):
                token_T = (routed.sample * tokens_IS.shape[1] + routed.position).numpy()
                misrouted += int((routed.ids.numpy() != ids_TLK[token_T, layer]).sum())
            largest = float(difference_BSV.max()) if difference_BSV.numel() else 0.0
            figures.append(RankFigures(largest, misrouted, model.traffic, []))
            world.report(trial.name)
        beside = Interleaved(world, harness.Request(PREDICTING, "quick"))
        for _ in range(rounds):
            for row, model in zip(figures, models, strict=True):
                beside.once()
                with stopwatch() as laps:
                    model(tokens_BS, sample_B)
                row.laps.append(laps)
            world.report("round")
        return RankResult(figures, [*beside.reports()])


def _keep_memory() -> None:
    """Let this process keep what it frees, and have some: a virtual machine's first touch of a page is slow."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc: macOS and musl, static builds, Windows
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    np.ones(KEPT_BYTES, np.uint8)


def _profile_beside(reports: Sequence[Start | Step]) -> Profile:
    """The profile of what was measured between forwards."""
    log = Log(PREDICTING, grid="quick", earlier=None, on_progress=None, on_profile=None)
    for report in reports:
        log.receive(report)
    return log.profile(complete=True)


def _measured(trial: Trial, ranks: Sequence[RankFigures], num_layers: int) -> RunFigures:
    def seconds(*parts: Part) -> float:
        """Seconds of a forward in these parts."""
        by_layer_RL = np.zeros((len(ranks[0].laps), num_layers))
        for part in parts:
            laps_DRN = np.array([[laps[part] for laps in rank.laps] for rank in ranks])
            by_layer_RL += laps_DRN.max(axis=0).reshape(*by_layer_RL.shape, -1).sum(axis=2)
        return float(np.median(by_layer_RL, axis=0).sum())

    traffic = [rank.traffic for rank in ranks]
    return RunFigures(
        name=trial.name,
        largest_difference=max(rank.largest_difference for rank in ranks),
        misrouted=sum(rank.misrouted for rank in ranks),
        copies=sum(one.copies for one in traffic),
        payload_bytes=sum(one.payload_bytes for one in traffic),
        kv_bytes=sum(one.kv_bytes for one in traffic),
        exchange_s=seconds("dispatch", "combine"),
        experts_s=seconds("experts"),
    )


def _replay(trace: Trace, trials: Sequence[Trial], profile: Profile) -> Sequence[plans.Contender]:
    """Replay every run on a trace that is one step."""
    index, model = index_samples(trace), trace.meta.model
    scene = Scene.of(
        trace,
        index,
        [np.ones(len(index.sample), np.bool_)],
        CLUSTER,
        size=StepSize("samples", len(index.sample)),
        profile=profile,
        model=replace(model, ffn_size=timed_ffn(model.ffn_size or 0)),
        passes=Passes(0.0, full_duplex=False),
    )
    contenders = []
    for trial in trials:
        plan = plans.load(trial.path)
        contenders.append(Contender(trial.name, journey_of(plan, lambda file: file.read(trials[0].path.parent))))
    return evaluate(scene, contenders).evaluation.fit.contenders
