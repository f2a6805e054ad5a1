from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import CertificationError, MismatchError
from moeplan.planner.certify import certifiable_trace, certify
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Plan
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import TraceMeta
from moeplan.traces.writer import TraceWriter
from tests.planner.edits import edited


def make_plan(trace: Any, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"strategy": "exflow", "trace": str(trace.path), "cluster": Cluster.parse("1x4")}
    return solve(Request.of(**settings | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy": "eplb", "redundant": 8},
        {"strategy": "contiguous", "redundant": 4},
        {"redundant": 4, "cluster": Cluster.parse("2x2")},
        {"dispatch_model": "standard"},
        {"fit_fraction": 1.0},
        {"samples_per_step": 3, "seed": 5},
        {"phases": ("prefill",)},
    ],
    ids=str,
)
@pytest.mark.parametrize("columns", [("sample",), ("step",), ()], ids=["sample", "step", "neither"])
def test_every_figure_of_a_fresh_plan_is_recomputed(make_trace: Any, changes: Any, columns: Any) -> None:
    trace = make_trace(samples=80, tokens=40, unrouted=0.05, columns=columns)
    certificate = certify(make_plan(trace, **changes), trace.path)
    assert certificate.figures > 20
    assert certificate.largest_difference < 1e-12
    assert "verdict" in certificate.checks


def test_a_plan_without_evaluation_lists_its_decisions_as_unchecked(make_trace: Any) -> None:
    trace = make_trace(samples=40)
    bare = make_plan(trace).model_copy(update={"evaluation": None, "verdict": None})
    assert any(line.startswith("decisions, objective and bound") for line in certify(bare, trace.path).unchecked)


@pytest.mark.parametrize("dispatch", ["coherent", "standard"])
def test_an_expert_that_a_token_names_twice_is_no_pair(make_trace: Any, tmp_path: Path, dispatch: Any) -> None:
    plain = make_trace(samples=40)
    with TraceWriter(tmp_path, TraceMeta(form="tokens", model=plain.model, recorder="test")) as writer:
        for batch in plain.batches():
            batch.ids[::3, :, 1] = batch.ids[::3, :, 0]
            writer.append(batch)
    trace = open_trace(tmp_path)
    plan = make_plan(trace, dispatch_model=dispatch, objective="copies")
    assert "objective" in certify(plan, trace.path).checks


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("evaluation.held_out.contenders.0.metrics.device_copies.value", lambda x: x * 0.999),
        ("evaluation.held_out.contenders.0.metrics.device_copies.low", lambda x: x * 0.999),
        ("evaluation.held_out.contenders.1.metrics.balance.value", lambda x: x + 1e-6),
        ("evaluation.held_out.contenders.4.metrics.hops_kept.high", lambda x: x + 1e-6),
        ("evaluation.fit.contenders.2.metrics.kv_bytes.value", lambda x: x + 1),
        ("evaluation.fit.contenders.3.metrics.intra_bytes.value", lambda x: x + 1),
        ("evaluation.fit.num_tokens", lambda x: x + 1),
        ("evaluation.held_out.num_samples", lambda x: x + 1),
        ("evaluation.held_out.num_steps", lambda x: x + 1),
        ("evaluation.held_out.dropped_samples", lambda x: x + 1),
        ("outcome.placement.objective.value", lambda x: x - 1e-6),
        ("outcome.placement.gap", lambda x: x / 2),
        ("outcome.placement.bound", 0.0),
        ("outcome.placement.status", "optimal"),
        ("outcome.placement", lambda x: {**x, "bound": x["objective"]["value"], "gap": 0.0, "status": "optimal"}),
        ("outcome.placement", lambda x: {**x, "bound": x["bound"] * 0.99, "gap": None}),
        ("outcome", {}),
        ("verdict", None),
        ("verdict.metric", "node_copies"),
        ("verdict.against", "eplb/standard"),
        ("verdict.against", "nobody"),
        ("strategies", ["eplb"]),
        ("options", {}),
        ("options.evaluation.samples_per_step", 0),
        ("options.evaluation.samples_per_step", "x"),
        ("options.evaluation.samples_per_step", 3),
        ("options.evaluation.unit", "step"),
        ("options.evaluation.home", "source_rank"),
        ("options.evaluation.phases", ["decode", "train"]),
        ("options.placement.strategy", "eplb"),
        ("options.placement.dispatch_model", lambda x: "standard" if x == "coherent" else "coherent"),
        ("inputs.base", {"path": "base.json", "sha256": "0" * 64}),
        ("evaluation.fit.contenders.1.name", "rival"),
        ("evaluation.held_out.contenders", lambda x: x[:-1]),
        ("evaluation.held_out.contenders", lambda x: [*x, x[-1]]),
        ("evaluation.held_out", None),
        ("verdict.gain.value", lambda x: x + 1e-6),
        ("verdict.gain.low", lambda x: x + 1e-6),
        ("verdict.value", lambda x: "none" if x == "benefit" else "benefit"),
        ("inputs.trace.num_tokens", lambda x: x + 1),
        ("inputs.trace.split.seed", 9),
        ("seed", 9),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_figure_that_the_trace_does_not_give_is_refused(make_trace: Any, path: str, change: Any) -> None:
    trace = make_trace(samples=40, tokens=20)
    plan = edited(make_plan(trace), path, change)
    with pytest.raises(CertificationError):
        certify(plan, trace.path)


def forge_objective(trace: Any, strategy: str, cluster: str) -> Plan:
    plan = make_plan(trace, strategy=strategy, cluster=Cluster.parse(cluster), redundant=0)
    return edited(plan, "outcome.placement.objective.value", lambda x: x * 1.001)


@pytest.mark.parametrize(("strategy", "cluster"), [("eplb", "1x4"), ("contiguous", "1x3"), ("exflow", "2x2")])
def test_a_forged_objective_is_refused_for_every_strategy(make_trace: Any, strategy: str, cluster: str) -> None:
    trace = make_trace(samples=40)
    with pytest.raises(CertificationError):
        certify(forge_objective(trace, strategy, cluster), trace.path)


def test_what_is_not_recomputed_is_listed(make_trace: Any) -> None:
    trace = make_trace(samples=40)
    certificate = certify(make_plan(trace, redundant=4), trace.path)
    assert "objective (expected_hops_kept)" in certificate.unchecked
    assert "objective" not in certificate.checks
    assert "unchecked" in certificate.summary("plan.json", trace.path)


def test_a_missing_or_invented_metric_is_refused(make_trace: Any) -> None:
    trace = make_trace()
    plan = make_plan(trace, cluster=Cluster.parse("1x2"))
    for change in (lambda m: {**m, "speed": {"value": 9.0, "low": None, "high": None}}, lambda _: {}):
        with pytest.raises(CertificationError, match=r"metrics|expected a metric"):
            certify(edited(plan, "evaluation.held_out.contenders.0.metrics", change), trace.path)


def test_another_trace_is_refused_by_its_hash(make_trace: Any) -> None:
    plan = make_plan(make_trace(seed=1))
    with pytest.raises(MismatchError, match="hash"):
        certify(plan, make_trace(seed=2).path)


def test_without_a_trace_only_the_structure_is_checked_and_it_says_so(make_trace: Any) -> None:
    trace = make_trace()
    certificate = certify(make_plan(trace))
    assert certificate.checks == ["placement rules", "gap of placement"]
    assert "structure only" in certificate.summary("plan.json", None)


def test_a_plan_finds_its_own_trace_only_while_that_has_its_hash(make_trace: Any, tmp_path: Any) -> None:
    import shutil

    trace = make_trace()
    folder = tmp_path / "trace"
    shutil.copytree(trace.path, folder)
    plan = make_plan(type("Trace", (), {"path": folder}))
    assert certifiable_trace(plan) == str(folder)
    near = edited(plan, "inputs/trace/path", "trace")  # relative to where it was solved, and to the plan
    assert certifiable_trace(near) is None
    assert certifiable_trace(near, tmp_path) == str(folder)
    shutil.copy(next(folder.glob("*.parquet")), folder / "part-0-1-1.parquet")
    assert certifiable_trace(plan) is None
    shutil.rmtree(folder)
    assert certifiable_trace(plan) is None
