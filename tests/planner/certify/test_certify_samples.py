"""Certificates of sample policies: every figure recomputed, every forged one refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError
from moeplan.planner.certify import certify
from moeplan.solvers.netmoe import port_bound, strategy
from tests.planner.makers import assert_refused, edited, generated, judged, planned, said

LINKS = ("intra=100:2", "inter=10:5")
HURRIED = {"sum": 1.0, "even": 0.5, "bottleneck": 2.0}


@pytest.fixture(scope="module")
def tokens(make_trace: Any) -> Any:
    return make_trace(samples=70, tokens=5)


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return generated(tmp_path_factory.mktemp("counts") / "trace", alpha=3.0, samples=64)


def certified(trace: Any, folder: Path, *asked: Any, **settings: Any) -> tuple[Any, Any]:
    """A policy, and its certificate by its trace and profile."""
    plan = planned(trace, "netmoe", *asked, to=folder / "plan.json", **settings)
    return plan, certify(plan, trace.path, settings.get("profile"), folder=folder)


@pytest.mark.parametrize(
    ("cluster", "columns", "links", "settings"),
    [
        ("2x2", ("sample",), (), {}),
        ("1x4", ("sample", "source_rank"), (), {}),
        ("4x1", ("sample", "step"), (), {"method": "paper"}),
        ("2x2", ("sample",), (), {"method": "bottleneck", "fit_fraction": 1.0}),
        ("2x2", ("sample",), LINKS, {"method": "bottleneck"}),
        ("1x4", ("sample",), LINKS[:1], {"method": "bottleneck"}),
        ("2x2", ("sample",), LINKS, {"method": "even"}),
        ("4x1", ("sample",), LINKS[1:], {"method": "even"}),
    ],
)
def test_the_figures_of_a_plan_are_those_of_a_second_count(
    make_trace: Any, tmp_path: Path, cluster: str, columns: Any, links: Any, settings: Any
) -> None:
    trace = make_trace(samples=70, tokens=5, columns=columns, ranks=4, unrouted=0.05)
    plan, certificate = certified(trace, tmp_path, cluster, links, **settings)
    assert certificate.figures > 20
    assert certificate.largest_difference < 1e-9
    assert plan.verdict.metric == ("exchange_s" if links else "device_copies" if cluster == "1x4" else "inter_bytes")


def test_a_plan_of_counts_is_certified_with_its_seconds(counts: Any, make_profile: Any, tmp_path: Path) -> None:
    plan, certificate = certified(counts, tmp_path, profile=make_profile("2x2"))
    assert "predicted seconds" in certificate.checks
    assert {"dispatch_s", "combine_s", "attention_s"} <= judged(plan)["plan/migrating"].keys()
    assert "seconds of the methods tried" in certify(plan, counts.path, folder=tmp_path).unchecked


def test_degrees_made_for_other_steps_or_seconds_keep_no_outcome_and_are_told(
    tokens: Any, make_profile: Any, tmp_path: Path
) -> None:
    base, profile = tmp_path / "base.json", make_profile("2x2")
    usual: dict[str, Any] = {
        "profile": profile,
        "cluster": planned(tokens, "pipemoe", profile=profile, to=base).cluster,
    }
    for changes in ({}, {"samples_per_step": 3}, {"profile": None}, {"cluster": "2x2"}):
        plan, certificate = certified(tokens, tmp_path, on=base, **usual | changes)
        assert ("pipeline" in plan.outcome) is not bool(changes)
        assert "placement alone" not in said(plan)
        told = any(what.startswith("objective of pipeline, decided for") for what in certificate.unchecked)
        assert told is bool(changes)


def test_steps_without_attention_judge(tokens: Any, make_profile: Any, tmp_path: Path) -> None:
    plan, certificate = certified(tokens, tmp_path, profile=make_profile("2x2", cases=("all_to_all", "expert_ffn")))
    assert "step_s" in judged(plan)["plan/migrating"]
    assert plan.verdict.metric == "step_s"
    assert "predicted seconds" in certificate.checks
    assert_refused(edited(plan, "verdict.metric", "exchange_s"), words="gain as a share|gain of the verdict")


def proven(outcome: dict[str, Any]) -> dict[str, Any]:
    """The outcome with its bound reached."""
    objective = outcome["objective"] | {"value": outcome["bound"]}
    return outcome | {"objective": objective, "gap": 0.0, "status": "optimal"}


@pytest.fixture(scope="module")
def policy(tokens: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A policy and its folder."""
    folder = tmp_path_factory.mktemp("policy")
    return planned(tokens, "netmoe", to=folder / "plan.json"), folder


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("verdict.value", "none", "verdict none"),
        ("options.sample_policy.tried_s", HURRIED, "expected no methods tried"),
        ("options.sample_policy.copies", "pairs", "copies are pairs"),
        ("outcome.sample_policy.bound_kind", "exact", "bound of sum: exact"),
        ("outcome.sample_policy", proven, "objective: the plan says"),
        ("decisions.sample_policy.predictor.sha256", "0" * 64, "has hash"),
        ("decisions.sample_policy.layers", [0, 1], "after every layer"),
    ],
)
def test_another_claim_is_refused(tokens: Any, policy: Any, path: str, value: object, message: str) -> None:
    plan, folder = policy
    assert_refused(edited(plan, path, value), tokens.path, words=message, folder=folder)


def test_a_predictor_that_is_gone_or_was_fitted_on_others_is_refused(tokens: Any, policy: Any, tmp_path: Path) -> None:
    plan, _ = policy
    certify(plan)
    with pytest.raises(InputError, match="is not there; the plan needs it beside it"):
        certify(plan, folder=tmp_path)
    other = planned(tokens, "netmoe", seed=1, to=tmp_path / "plan.json")
    theirs = other.decisions.sample_policy.predictor.model_dump()
    forged = edited(plan, "decisions.sample_policy.predictor", theirs)
    assert_refused(forged, tokens.path, words="the plan says|it was fitted on others", folder=tmp_path)


def test_the_methods_tried_are_timed_again_and_forged_times_refused(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=40.0, samples=96, uneven=True)
    plan, certificate = certified(trace, tmp_path, "2x2", LINKS)
    tried_s = plan.options["sample_policy"]["tried_s"]
    assert plan.decisions.sample_policy.method == "bottleneck" == min(tried_s, key=tried_s.get)
    assert "methods tried" in certificate.checks
    for claimed in ({}, HURRIED):
        forged = edited(plan, "options.sample_policy.tried_s", claimed)
        assert_refused(forged, words="expected the fastest of")
    forged = edited(plan, "options.sample_policy.tried_s.sum", lambda seconds: 2 * seconds)
    assert_refused(forged, trace.path, words="tried sum", folder=tmp_path)


@pytest.mark.parametrize("path", ["cluster.num_nodes", "cluster.devices_per_node"])
def test_counts_on_devices_that_do_not_divide_the_experts_are_refused(counts: Any, tmp_path: Path, path: str) -> None:
    plan = edited(planned(counts, "netmoe", to=tmp_path / "plan.json"), path, 3)
    for given in (None, counts.path):
        assert_refused(plan, given, words="counts with replicas: 8 experts on the 6 devices", folder=tmp_path)
    claimed = edited(plan, "options.sample_policy.copies", "devices")
    assert_refused(claimed, counts.path, words="no predictor of this plan", folder=tmp_path)


def test_that_a_method_was_asked_for_and_swaps_are_taken_as_they_are_is_told(counts: Any, tmp_path: Path) -> None:
    methods = (None, "sum", "bottleneck")
    unchecked = [" ".join(certified(counts, tmp_path, method=method)[1].unchecked) for method in methods]
    assert ["that the method was asked for" in what for what in unchecked] == [False, True, True]
    assert ["swap helps" in what for what in unchecked] == [False, False, True]


def test_a_solver_that_tells_half_the_cost_of_its_homes_is_found_out(
    tokens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = strategy._link_cost
    monkeypatch.setattr(strategy, "_link_cost", lambda *given: whole(*given) / 2)
    plan = planned(tokens, "netmoe", to=tmp_path / "plan.json")
    assert_refused(plan, tokens.path, words="objective: the plan says", folder=tmp_path)


def test_a_solver_that_calls_every_time_optimal_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = port_bound.least_time
    for module in (strategy, port_bound):
        monkeypatch.setattr(module, "least_time", lambda *given: dataclasses.replace(real(*given), seconds=1e18))
    trace = generated(tmp_path / "trace", alpha=3.0, samples=64, uneven=True)
    plan = planned(trace, "netmoe", "2x2", LINKS, method="bottleneck", to=tmp_path / "plan.json")
    assert plan.outcome["sample_policy"].status == "optimal"
    assert_refused(plan, trace.path, words="bound: the plan says", folder=tmp_path)
