"""NetMoE as a strategy: count the samples, fit the predictor, re-home online, judge beside the oracle and the base."""

import hashlib
import time
from dataclasses import replace

from ...profilers.cluster import Cluster
from ...runtime.decisions import SamplePolicyDecision, SidecarFile
from ...runtime.migrating.predictor import Predictor
from ...solvers.assignment import backend_of
from ...solvers.netmoe import METHODS, compile_rehoming
from ...solvers.outcome import ROUNDING, Objective, Outcome, Status
from ...traces.count_form import CountTrace
from ...traces.model import ModelSpec
from ..evaluate import judge, verdict
from ..measures.speeds import Speeds
from ..solved import Solved
from ..task import Task
from .moves import with_moves
from .online import Totals
from .policy import SamplePolicyOptions
from .run import EXCHANGE, Run

__all__ = ["PAYS_FROM", "judged_metric", "solve"]

PAYS_FROM = 0.02  # of bytes, copies or their seconds: what follows a sample (labels, masks) and the solves are extra
TRIED = ("sum", "even", "bottleneck")  # where exchanges are timed and no method is asked for


def solve(task: Task) -> Solved:
    """The sample policy for a task.

    Raises
    ------
    UsageError
        The trace has no samples, or a placement with replicas that its traffic does not follow.
    """
    run, tried = Run.of(task), {}
    several = task.request.method is None and run.speeds is not None and run.speeds.exchange
    compiled_s = sum(compile_rehoming(method, run.cluster) for method in (TRIED if several else [run.method]))
    if several:
        task.say(f"trying {', '.join(TRIED)} on the fitted steps")
        tried = {method: run.timed_s(method) for method in TRIED}
        run = replace(run, method=min(TRIED, key=lambda method: tried[method]))
    locality = run.locality()
    task.say(f"locality index {locality.share:.1%}: no homes save a larger share; re-homing the samples online")
    rows = [run.row(place) for place in run.parts]
    cohorts = [run.cohort(place) for place in run.parts]
    found = judge(cohorts, [[one for one, _ in row] for row in rows], run.model, run.speeds, seed=task.request.seed)
    predictor = run.predictors.get("plan")
    name = None if predictor is None else SidecarFile(file=predictor.file_name, sha256=_sha256(predictor))
    metric = judged_metric(run.speeds, run.cluster, run.model)
    dealt = verdict(found, metric, "dealt/standard")
    return Solved(
        decision=SamplePolicyDecision(method=run.method, layers=tuple(range(run.model.num_layers)), predictor=name),
        options=SamplePolicyOptions(
            copies=run.copies,
            blind_copies=locality.blind,
            least_copies=locality.least,
            over_dealt=dealt.gain,
            asked=task.request.method is not None,
            tried_s=tried,
        ),
        outcome=replace(_outcome(rows[0][0][1].totals, run.method), compiled_s=compiled_s),
        evaluated=replace(
            with_moves(found, cohorts, [[homes for _, homes in row] for row in rows], task.request.seed),
            at_least=PAYS_FROM,
        ),
        against="base/standard" if run.has_base else "contiguous/standard",
        metric=metric,
        judged_by=run.judged_by(task),
        num_tokens=int(run.roll.tokens.sum()) if isinstance(task.source, CountTrace) else None,
        sidecars={} if predictor is None else {predictor.file_name: predictor.to_bytes()},
    )


def judged_metric(speeds: Speeds | None, cluster: Cluster, model: ModelSpec) -> str:
    """What the verdict is about where there is no `step_s`: seconds of both exchanges; where nothing times them, bytes
    between nodes, copies where bytes are not known; on one node copies between devices.
    """
    if speeds is not None and speeds.exchange:
        return EXCHANGE
    if cluster.num_nodes == 1:
        return "device_copies"
    return "inter_bytes" if model.copy_bytes else "node_copies"


def _outcome(totals: Totals, method: str) -> Outcome:
    """The mean over the re-homings of the fitted steps of what was reached, next layers as predicted."""
    value, bound = totals.value / totals.layers, totals.bound / totals.layers
    return Outcome.of(
        status=Status.FEASIBLE,
        objective=Objective(totals.name, value, "min"),
        bound=bound,
        bound_kind="weighted ports" if METHODS[method].goal == "bottleneck" else "transportation",
        proven=value <= bound * (1 + ROUNDING),
        started=time.perf_counter() - totals.wall_s,
        backend=backend_of(METHODS[method].assignment),
    )


def _sha256(predictor: Predictor) -> str:
    return hashlib.sha256(predictor.to_bytes()).hexdigest()
