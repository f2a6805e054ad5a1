"""Certificates of sample policies: every figure recomputed, every forged one refused."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import CertificationError, InputError
from moeplan.planner.certify import Certificate, certify
from moeplan.planner.request import Request
from moeplan.planner.solve import Made, make, solve
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load as load_profile
from moeplan.runtime.plan import save
from moeplan.solvers.netmoe import port_bound, strategy
from moeplan.traces.count_form import CountTrace
from moeplan.traces.reader import Trace
from tests.planner.edits import edited
from tests.planner.makers import generated, judged, part_of, solved

MakeTrace = Callable[..., Trace]


def certificate_of(made: Made, trace: Trace | CountTrace, folder: Path, profile: Path | None = None) -> Certificate:
    made.save(folder / "plan.json")
    return certify(made.plan, trace.path, profile, folder=folder)


@pytest.mark.parametrize(
    ("cluster", "columns", "options"),
    [
        ("2x2", ("sample",), {}),
        ("1x4", ("sample", "source_rank"), {}),
        ("4x1", ("sample", "step"), {"method": "paper"}),
        ("2x2", ("sample",), {"method": "bottleneck", "fit_fraction": 1.0}),
        ("2x2", ("sample",), {"method": "bottleneck", "links": ("intra=100:2", "inter=10:5")}),
        ("1x4", ("sample",), {"method": "bottleneck", "links": ("intra=100:2",)}),
        ("2x2", ("sample",), {"method": "even", "links": ("intra=100:2", "inter=10:5")}),
        ("4x1", ("sample",), {"method": "even", "links": ("inter=10:5",)}),
    ],
)
def test_the_figures_of_a_plan_are_those_of_a_second_count(
    make_trace: MakeTrace, tmp_path: Path, cluster: str, columns: tuple[str, ...], options: dict[str, Any]
) -> None:
    trace = make_trace(samples=70, tokens=5, columns=columns, ranks=4, unrouted=0.05)
    made = solved(trace, cluster, **options)
    certificate = certificate_of(made, trace, tmp_path)
    assert certificate.figures > 20
    assert certificate.largest_difference < 1e-9
    assert made.plan.verdict is not None
    untimed = "device_copies" if cluster == "1x4" else "inter_bytes"
    assert made.plan.verdict.metric == ("exchange_s" if "links" in options else untimed)


def test_a_plan_of_counts_with_a_profile_is_certified_with_its_seconds(
    make_profile: Callable[..., Path], tmp_path: Path
) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=120)
    profile = make_profile("2x2")
    made = solved(trace, profile=profile)
    assert "predicted seconds" in certificate_of(made, trace, tmp_path, profile).checks
    plan = judged(made.plan)["plan/migrating"]
    assert {"dispatch_s", "combine_s", "attention_s"} <= plan.keys()
    made = solved(trace)
    model = made.plan.model
    assert made.plan.inputs.trace is not None
    tables = np.concatenate([table.counts for table in trace.tables()]).reshape(120, 3, 8)
    assert made.plan.inputs.trace.num_tokens == (tables.sum(axis=2) // model.top_k).max(axis=1).sum()


@pytest.mark.parametrize(
    ("changes", "kept"),
    [({}, True), ({"samples_per_step": 3}, False), ({"profile": None}, False), ({"cluster": "2x2"}, False)],
    ids=["as before", "other steps", "no profile", "no links"],
)
def test_degrees_made_for_other_steps_or_seconds_keep_no_outcome_and_are_told_as_unchecked(
    make_trace: MakeTrace, make_profile: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], kept: bool
) -> None:
    trace, profile, base = make_trace(samples=70, tokens=5), make_profile("2x2"), tmp_path / "base.json"
    asked: dict[str, Any] = {"trace": trace.path, "cluster": load_profile(profile).cluster, "profile": profile}
    save(solve(Request.of(strategy="pipemoe", **asked)), base)
    asked |= changes
    if isinstance(asked["cluster"], str):
        asked["cluster"] = Cluster.parse(asked["cluster"])
    made = make(Request.of(strategy="netmoe", on=base, **asked))
    unchecked = certificate_of(made, trace, tmp_path, asked["profile"]).unchecked
    assert ("pipeline" in made.plan.outcome) is kept
    assert any(what.startswith("objective of pipeline, decided for") for what in unchecked) is not kept


def test_steps_without_attention_do_not_judge_and_hidden_seconds_are_refused(
    make_trace: MakeTrace, make_profile: Callable[..., Path], tmp_path: Path
) -> None:
    trace = make_trace(samples=70, tokens=5)
    profile = make_profile("2x2", cases=("all_to_all", "expert_ffn"))
    made = solved(trace, profile=profile)
    assert "step_s" in judged(made.plan)["plan/migrating"]
    assert made.plan.verdict is not None
    assert made.plan.verdict.metric == "exchange_s"
    assert "predicted seconds" in certificate_of(made, trace, tmp_path, profile).checks
    with pytest.raises(CertificationError, match="verdict on step_s"):
        certify(edited(made.plan, "verdict.metric", "step_s"))
    kept = {name: one for name, one in part_of(made.plan).contenders[0].metrics.items() if name != "step_s"}
    hidden = {name: one.model_dump(mode="json") for name, one in kept.items()}
    with pytest.raises(CertificationError, match="what times it gives"):
        certify(edited(made.plan, "evaluation.held_out.contenders.0.metrics", hidden))


def proven(outcome: dict[str, Any]) -> dict[str, Any]:
    """The outcome with its bound reached."""
    objective = outcome["objective"] | {"value": outcome["bound"]}
    return outcome | {"objective": objective, "gap": 0.0, "status": "optimal"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("evaluation.held_out.contenders.0.metrics.inter_bytes.value", 1.0, "gain of the verdict"),
        ("evaluation.held_out.contenders.0.metrics.samples_moved.value", 0.0, "samples_moved"),
        ("verdict.gain.low", 1e9, "gain low"),
        ("verdict.at_least", 0.0, "from 0.0 on; expected"),
        ("verdict.value", "none", "verdict none"),
        ("options.sample_policy.tried_s", {"sum": 1.0, "even": 0.5, "bottleneck": 2.0}, "expected no methods tried"),
        ("options.sample_policy.over_dealt.low", -1e9, "gain over dealt low"),
        ("options.sample_policy.copies", "pairs", "copies are pairs"),
        ("outcome.sample_policy.bound_kind", "exact", "bound of sum: exact"),
        ("verdict.against", "oracle/migrating", "verdict on"),
        ("options.sample_policy.least_copies", 0.0, "least copies"),
        ("outcome.sample_policy.objective.value", 1e9, "gap of sample_policy"),
        ("outcome.sample_policy", proven, "objective: the plan says"),
        ("decisions.sample_policy.method", "magic", "expected sum"),
        ("decisions.sample_policy.predictor.sha256", "0" * 64, "has hash"),
        ("decisions.sample_policy.layers", [0, 1], "after every layer"),
    ],
)
def test_a_plan_that_claims_something_else_is_refused(
    make_trace: MakeTrace, tmp_path: Path, path: str, value: object, message: str
) -> None:
    trace = make_trace(samples=70, tokens=5)
    made = solved(trace)
    made.save(tmp_path / "plan.json")
    plan = edited(made.plan, path, value, hashed=True)
    with pytest.raises(CertificationError, match=message):
        certify(plan, trace.path, folder=tmp_path)


def test_a_predictor_that_is_gone_or_was_fitted_on_others_is_refused(make_trace: MakeTrace, tmp_path: Path) -> None:
    trace = make_trace(samples=70, tokens=5)
    made, other = solved(trace), solved(trace, seed=1)
    certify(made.plan)
    with pytest.raises(InputError, match="is not there; the plan needs it beside it"):
        certify(made.plan, folder=tmp_path)
    assert made.plan.decisions.sample_policy is not None
    assert other.plan.decisions.sample_policy is not None
    theirs = other.plan.decisions.sample_policy.predictor
    assert theirs is not None
    other.save(tmp_path / "plan.json")
    plan = edited(made.plan, "decisions.sample_policy.predictor", theirs.model_dump(), hashed=True)
    with pytest.raises(CertificationError, match=r"the plan says|it was fitted on others"):
        certify(plan, trace.path, folder=tmp_path)


def test_the_methods_tried_are_timed_again_and_forged_times_refused(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=40.0, samples=96, uneven=True)
    made = solved(trace, links=("intra=100:2", "inter=10:5"))
    assert made.plan.decisions.sample_policy is not None
    assert made.plan.decisions.sample_policy.method == "bottleneck"
    assert "methods tried" in certificate_of(made, trace, tmp_path).checks
    with pytest.raises(CertificationError, match="expected the fastest of"):
        certify(edited(made.plan, "options.sample_policy.tried_s", {}))
    hurried = {"sum": 1.0, "even": 0.5, "bottleneck": 2.0}
    with pytest.raises(CertificationError, match="expected the fastest of"):
        certify(edited(made.plan, "options.sample_policy.tried_s", hurried))
    forged = edited(made.plan, "options.sample_policy.tried_s.sum", lambda seconds: 2 * seconds)
    with pytest.raises(CertificationError, match="tried sum"):
        certify(forged, trace.path, folder=tmp_path)


@pytest.mark.parametrize("path", ["cluster.num_nodes", "cluster.devices_per_node"])
def test_counts_on_devices_that_do_not_divide_the_experts_are_refused(tmp_path: Path, path: str) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=64)
    made = solved(trace)
    made.save(tmp_path / "plan.json")
    plan = edited(made.plan, path, 3, hashed=True)
    for given in (None, trace.path):
        with pytest.raises(CertificationError, match="counts with replicas: 8 experts on the 6 devices"):
            certify(plan, given, folder=tmp_path)
    claimed = edited(plan, "options.sample_policy.copies", "devices")
    with pytest.raises(CertificationError, match="no predictor of this plan"):
        certify(claimed, trace.path, folder=tmp_path)


def test_that_a_method_was_asked_for_is_told_as_unchecked(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=64)
    found = [certificate_of(solved(trace, method=method), trace, tmp_path) for method in (None, "sum")]
    assert ["that the method was asked for" in one.unchecked for one in found] == [False, True]


def test_of_methods_tried_by_a_profile_that_is_not_given_it_says_so(
    make_profile: Callable[..., Path], tmp_path: Path
) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=64)
    made = solved(trace, profile=make_profile("2x2"))
    assert "seconds of the methods tried" in certificate_of(made, trace, tmp_path).unchecked


def test_a_solver_that_tells_half_the_cost_of_its_homes_is_found_out(
    make_trace: MakeTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = strategy._link_cost
    monkeypatch.setattr(strategy, "_link_cost", lambda *given: whole(*given) / 2)
    trace = make_trace(samples=70, tokens=5)
    with pytest.raises(CertificationError, match="objective: the plan says"):
        certificate_of(solved(trace), trace, tmp_path)


def test_a_solver_that_calls_every_time_optimal_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = port_bound.least_time
    for module in (strategy, port_bound):
        monkeypatch.setattr(module, "least_time", lambda *given: dataclasses.replace(real(*given), seconds=1e18))
    trace = generated(tmp_path / "trace", alpha=3.0, samples=64, uneven=True)
    made = solved(trace, links=("intra=100:2", "inter=10:5"), method="bottleneck")
    assert made.plan.outcome["sample_policy"].status == "optimal"
    with pytest.raises(CertificationError, match="bound: the plan says"):
        certificate_of(made, trace, tmp_path)


def test_a_bottleneck_plan_says_that_its_swaps_are_taken_as_they_are(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=64)
    found = [certificate_of(solved(trace, method=method), trace, tmp_path) for method in ("sum", "bottleneck")]
    assert ["swap helps" in " ".join(one.unchecked) for one in found] == [False, True]
