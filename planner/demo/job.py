"""The main job on the embedded model: profile, record, solve, apply, run, and hold the run against the prediction."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import UsageError
from ...profilers import measure, profile
from ...profilers.cluster import Cluster
from ...profilers.profile import Profile
from ...runtime import plan as plans
from ...runtime.active import activate
from ...runtime.plan import Plan
from ...solvers.placement import Placement
from ...traces.reader import Trace
from ..certify import Certificate, certify
from ..replay import COUNTS, Route, replay
from ..request import Request
from ..solve import solve
from ..survey import survey
from .record import SAMPLE_TOKENS, record_embedded
from .run import Measured, Trial, run_trials
from .text import other_text, record_text, samples

__all__ = ["Demo", "run_demo"]

NUM_RANKS = 4


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo made and found.

    Parameters
    ----------
    plan
        ExFlow's, coherent, fitted and judged on one half of the held-out text.
    certificate
        Its recount.
    runs
        Contiguous and plan, coherent and standard, measured on the other half.
    replayed
        Copies a token and layer that replaying the other half's routing gives for each run.
    num_samples, num_tokens
        Of the other half.
    """

    folder: Path
    profile: Profile
    plan: Plan
    certificate: Certificate
    runs: list[Measured]
    replayed: list[float]
    num_samples: int
    num_tokens: int


def run_demo(folder: Path, *, on_progress: Callable[[str], None] = lambda _: None) -> Demo:
    """Run the whole chain in an empty or missing folder.

    Raises
    ------
    UsageError
        The folder holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: already there and not empty; remove it or choose another with -o")
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
    return Demo(folder, measured, planned, certificate, runs, _replay(other, trials), len(tokens_IS), tokens_IS.size)


def _profile(folder: Path, on_progress: Callable[[str], None]) -> Profile:
    found = measure.measure(
        num_ranks=NUM_RANKS,
        device="cpu",
        quick=True,
        on_progress=lambda step: on_progress(f"measuring {step.case}: {step.done} of {step.total} sizes"),
    )
    assert found is not None  # not in a launched world
    profile.save(found, folder / "profile.json")
    return found


def _plan(folder: Path, cluster: Cluster, on_progress: Callable[[str], None]) -> tuple[Plan, Certificate]:
    on_progress("solving exflow")
    planned = _solve(folder, cluster, "exflow")
    plans.save(planned, folder / "plan.json")
    on_progress("certifying the plan")
    certificate = certify(planned, folder / "traces")
    activate(folder / "plan.json", folder)
    return planned, certificate


def _solve(folder: Path, cluster: Cluster, strategy: str) -> Plan:
    return solve(
        Request(strategy=strategy, trace=str(folder / "traces"), cluster=cluster, profile=folder / "profile.json")
    )


def _replay(trace: Trace, trials: list[Trial]) -> list[float]:
    """Copies a token and layer on a trace, run by run."""
    found, cluster = survey(trace), trials[0].plan.cluster
    everything = found.cohort(
        np.ones(len(found.unit_ids), dtype=np.bool_), num_devices=cluster.num_devices, samples_per_step=1
    )
    routes = [Route(trial.name, trial.dispatch_model, _placement(trial.plan)) for trial in trials]
    tallies = replay(trace, [everything], routes, cluster)[0]
    cells = trace.num_tokens * trace.model.num_layers
    return [float(tally.counts[:, COUNTS.index("device_copies")].sum() / cells) for tally in tallies]


def _placement(plan: Plan) -> Placement:
    assert plan.placement is not None
    return plan.placement
