"""The main job on the embedded model: profile, record, solve, apply, run, and hold the run against the prediction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...files import check_target
from ...profilers import measure, profile
from ...profilers.cluster import Cluster
from ...profilers.profile import Profile
from ...runtime import plan as plans
from ...runtime.active import activate
from ...runtime.plan import Plan
from ...solvers.outcome import Status
from ...traces.reader import Trace
from ..certify import Certificate, certify
from ..evaluate.evaluate import evaluate
from ..evaluate.journey import Contender, Journey
from ..evaluate.scene import Scene
from ..evaluate.splits import index_units
from ..request import Request
from ..solve import solve
from .run import Measured, Trial, run_trials
from .text import SAMPLE_TOKENS, other_text, record_embedded, record_text, samples

NUM_RANKS = 4


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


def run_demo(folder: Path, *, on_progress: Callable[[str], None] = lambda _: None) -> Demo:
    """Run the whole chain in an empty or missing folder.

    Raises
    ------
    UsageError
        The folder holds something, or is none.
    StorageError
        It cannot be made.
    KeyboardInterrupt
        On Ctrl-C; no plan is active then.
    """
    check_target(folder, directory=True)
    measured = _profile(folder, on_progress)
    on_progress("recording the embedded model on text")
    record_embedded(record_text(), folder / "traces")
    planned, certificate = _plan(folder, measured.cluster, on_progress)
    contiguous = _solve(folder, measured.cluster, "contiguous")
    on_progress("recording other text in one process")
    other = record_embedded(other_text(), folder / "other-traces")
    trials = [
        Trial("contiguous", "coherent", contiguous),
        Trial("plan", "coherent", planned),
        Trial("contiguous", "standard", contiguous),
        Trial("plan", "standard", planned),
    ]
    tokens_IS = samples(other_text(), SAMPLE_TOKENS)
    ids_TLK = np.concatenate([batch.ids for batch in other.batches()])
    on_progress(f"running the model on {NUM_RANKS} processes")
    runs = run_trials(trials, tokens_IS, ids_TLK)
    return Demo(
        folder, measured, planned, certificate, runs, _replay(other, trials, measured), len(tokens_IS), tokens_IS.size
    )


def _profile(folder: Path, on_progress: Callable[[str], None]) -> Profile:
    measured = measure.measure(
        num_ranks=NUM_RANKS,
        device="cpu",
        quick=True,
        on_progress=lambda step: on_progress(f"measuring {step.case}: {step.done} of {step.total} sizes"),
    )
    assert measured is not None  # not in a launched world
    if not measured.complete:
        raise KeyboardInterrupt  # Ctrl-C, which measuring answers with what it has
    profile.save(measured, folder / "profile.json")
    return measured


def _plan(folder: Path, cluster: Cluster, on_progress: Callable[[str], None]) -> tuple[Plan, Certificate]:
    on_progress("solving exflow")
    planned = _solve(folder, cluster, "exflow")
    if any(outcome.status is Status.INTERRUPTED for outcome in planned.outcome.values()):
        raise KeyboardInterrupt
    plans.save(planned, folder / "plan.json")
    on_progress("certifying the plan")
    certificate = certify(planned, folder / "traces", folder / "profile.json")
    activate(folder / "plan.json", folder)
    return planned, certificate


def _solve(folder: Path, cluster: Cluster, strategy: str) -> Plan:
    return solve(
        Request.of(strategy=strategy, trace=str(folder / "traces"), cluster=cluster, profile=folder / "profile.json")
    )


def _replay(trace: Trace, trials: list[Trial], profile: Profile) -> Sequence[plans.Contender]:
    """Replay every run on a trace that is one step."""
    index, cluster = index_units(trace), trials[0].plan.cluster
    every_U = np.ones(len(index.unit_ids), np.bool_)
    scene = Scene.of(trace, index, [every_U], cluster, samples_per_step=len(every_U), profile=profile)
    contenders = []
    for trial in trials:
        assert trial.plan.placement is not None
        contenders.append(Contender(trial.name, Journey(trial.dispatch_model, trial.plan.placement)))
    return evaluate(scene, contenders).evaluation.fit.contenders
