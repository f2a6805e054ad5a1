"""Pipelined plans as tests make them, and what they say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.planner.options import PipelineOptions
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.profile import load
from moeplan.runtime.plan import Plan, save
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import PHASES, TraceMeta
from moeplan.traces.writer import TraceWriter


def make_plan(trace: Any, by: Path, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"strategy": "pipemoe", "trace": str(trace.path), "cluster": load(by).cluster}
    return solve(Request(**settings | {"profile": by} | changes))


def placed(trace: Any, profile: Path, path: Path, **changes: Any) -> Path:
    """A base: experts placed by eplb."""
    save(make_plan(trace, profile, **{"strategy": "eplb"} | changes), path)
    return path


def training(trace: Any, folder: Path) -> Any:
    """The trace with every token in training."""
    with TraceWriter(folder, TraceMeta(form="tokens", model=trace.model, recorder="test")) as writer:
        for batch in trace.batches():
            writer.append(replace(batch, phase=np.full(len(batch), PHASES.index("train"), np.int8)))
    return open_trace(folder)


def options(plan: Plan) -> PipelineOptions:
    return PipelineOptions.model_validate(dict(plan.options["pipeline"]))


def seconds(plan: Plan, label: str, metric: str) -> float:
    assert plan.evaluation is not None
    return next(one for one in plan.evaluation.fit.contenders if one.label == label).metrics[metric].value
