"""Predicted seconds recomputed by other code, and refused where they were edited."""

from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import CertificationError, MismatchError
from moeplan.planner.certify import certifiable_profile, certify
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load
from moeplan.runtime.plan import Plan, parse
from tests.planner.edits import edited


def make_plan(trace: Any, profile: Path | None, **changes: Any) -> Plan:
    cluster = Cluster.parse("1x4") if profile is None else load(profile).cluster
    settings: dict[str, Any] = {"strategy": "exflow", "trace": str(trace.path), "cluster": cluster, "profile": profile}
    return solve(Request.of(**settings | changes))


@pytest.mark.parametrize(
    ("cluster", "changes"),
    [
        ("1x4", {}),
        ("2x2", {"redundant": 4}),
        ("3x1", {"dispatch_model": "standard"}),
        ("1x4", {"strategy": "eplb", "slots": 3}),
        ("2x2", {"strategy": "contiguous", "fit_fraction": 1.0}),
        ("1x4", {"samples_per_step": 500}),
    ],
    ids=str,
)
@pytest.mark.parametrize("top_k", [1, 2])
def test_every_second_of_a_fresh_plan_is_recomputed(
    make_trace: Any, make_profile: Any, cluster: str, changes: Any, top_k: int
) -> None:
    trace, profile = make_trace(samples=90, tokens=30, unrouted=0.05, top_k=top_k), make_profile(cluster)
    plan = make_plan(trace, profile, **changes)
    certificate = certify(plan, trace.path, profile)
    assert "step_s" in plan.evaluation.fit.contenders[0].metrics  # type: ignore[union-attr]
    assert {"profile hash", "predicted seconds", "verdict"} <= set(certificate.checks)
    assert "solver seconds, status, method and backend" in certificate.unchecked
    assert certificate.largest_difference < 1e-12


@pytest.fixture(scope="module")
def made(make_trace: Any, make_profile: Any) -> tuple[Any, Path, Plan]:
    """A trace, a profile, and the plan made from both."""
    trace, profile = make_trace(samples=80, tokens=120), make_profile()
    return trace, profile, make_plan(trace, profile)


HELD = "evaluation/held_out/contenders"


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (f"{HELD}/0/metrics/step_s/value", lambda x: x * 0.999),
        (f"{HELD}/0/metrics/step_s/low", lambda x: x * 1.001),
        (f"{HELD}/1/metrics/dispatch_s/value", lambda x: x * 1.001),
        (f"{HELD}/1/metrics/experts_s/high", lambda x: x * 1.001),
        (f"{HELD}/2/metrics/kv_s/value", lambda x: x * 0.999),
        (f"{HELD}/3/metrics/combine_s/value", 0.0),
        (f"{HELD}/4/metrics/attention_s/value", lambda x: x * 1.001),
        ("evaluation/fit/contenders/0/metrics/dispatch_s/value", lambda x: x * 1.001),
        (f"{HELD}/0/metrics", lambda x: {name: found for name, found in x.items() if name != "attention_s"}),
        (f"{HELD}/0/metrics", lambda x: {name: found for name, found in x.items() if name != "step_s"}),
        ("verdict/metric", "device_copies"),
        ("verdict/gain/value", lambda x: x + 1e-6),
        ("verdict/gain/low", lambda x: x + 1e-6),
        ("options/seconds/sources/experts", "expert_ffn/bf16"),
        ("options/seconds/extrapolated", {}),
        ("options/seconds/extrapolated/experts_s", 0.5),
        ("options/seconds", {}),
        ("options/seconds/missing", 3),
        ("options/seconds/missing", {"attention": "the profile has no attention"}),
        ("options/seconds/other_dtype", []),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_edited_seconds_are_refused(made: Any, path: str, change: Any) -> None:
    trace, profile, plan = made
    with pytest.raises(CertificationError):
        certify(edited(plan, path, change), trace.path, profile)


def test_without_the_profile_seconds_are_listed_as_unchecked(made: Any) -> None:
    trace, _, plan = made
    certificate = certify(plan, trace.path)
    assert "predicted seconds (give the plan's profile)" in certificate.unchecked
    assert "the gain of the verdict" in certificate.unchecked
    assert "the profile's hash" in certificate.unchecked
    assert "metrics of every contender" in certificate.checks


def test_a_benefit_that_its_own_gain_does_not_show_is_refused_without_the_profile(made: Any) -> None:
    trace, _, plan = made
    flipped = edited(plan, "verdict/value", lambda x: "none" if x == "benefit" else "benefit")
    with pytest.raises(CertificationError, match="verdict"):
        certify(flipped, trace.path)


def test_seconds_by_links_alone_are_recomputed_from_the_plan(make_trace: Any) -> None:
    trace, cluster = make_trace(samples=80), Cluster.parse("2x2", ["intra=100:2", "inter=10:9"])
    plan = make_plan(trace, None, cluster=cluster)
    assert "predicted seconds" in certify(plan, trace.path).checks
    with pytest.raises(CertificationError):
        certify(edited(plan, f"{HELD}/0/metrics/dispatch_inter_s/value", lambda x: x * 1.001), trace.path)


def test_a_single_step_by_links_has_no_interval_in_either_count(make_trace: Any) -> None:
    trace, cluster = make_trace(samples=40), Cluster.parse("1x4", ["intra=100:2"])
    plan = make_plan(trace, None, cluster=cluster, samples_per_step=500)
    assert plan.evaluation is not None
    assert plan.evaluation.fit.contenders[0].metrics["dispatch_s"].low is None
    assert certify(plan, trace.path).largest_difference < 1e-12


def test_a_verdict_on_steps_that_do_not_compare_is_refused(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=40), make_profile(cases=("all_to_all", "all_gather", "expert_ffn"))
    plan = make_plan(trace, profile)
    assert "verdict" in certify(plan, trace.path, profile).checks
    with pytest.raises(CertificationError, match="gain of the verdict"):
        certify(edited(plan, "verdict/metric", "step_s"), trace.path, profile)


def test_another_profile_is_refused_by_its_hash(made: Any, make_profile: Any) -> None:
    trace, _, plan = made
    for one in (plan, make_plan(trace, None)):
        with pytest.raises(MismatchError, match="hash"):
            certify(one, trace.path, make_profile(noise=0.2))


def test_a_plan_finds_its_own_profile_only_while_that_has_its_hash(make_trace: Any, make_profile: Any) -> None:
    profile = make_profile()
    plan = make_plan(make_trace(samples=80), profile)
    assert certifiable_profile(plan) == str(profile)
    profile.write_text(profile.read_text() + "\n")
    assert certifiable_profile(plan) is None
    profile.unlink()
    assert certifiable_profile(plan) is None
    assert certifiable_profile(make_plan(make_trace(samples=80), None)) is None


def stripped(value: Any) -> Any:
    """A plan's JSON without any second, as if it had been made without a profile."""
    value["options"].pop("seconds")
    for part in ("fit", "held_out"):
        for contender in value["evaluation"][part]["contenders"]:
            contender["metrics"] = {k: v for k, v in contender["metrics"].items() if not k.endswith("_s")}
    return value


def test_a_plan_whose_seconds_were_cut_out_with_its_verdict_is_refused(made: Any) -> None:
    trace, profile, plan = made
    without = make_plan(trace, None, cluster=plan.cluster)
    value = stripped(plan.model_dump(mode="json"))
    value["verdict"] = without.model_dump(mode="json")["verdict"]
    for given in (profile, None):
        with pytest.raises(CertificationError, match=r"options\.seconds"):
            certify(parse(value, "forged"), trace.path, given)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (f"{HELD}/0/metrics/step_s", {"value": -1e-9, "low": None, "high": None}),
        (f"{HELD}/0/metrics/experts_s", {"value": 1e-3, "low": 5.0, "high": 1.0}),
        (f"{HELD}/0/metrics/magic_s", {"value": 1e-3, "low": None, "high": None}),
        (f"{HELD}/1/metrics/kv_s", {"value": 1e-3, "low": None, "high": None}),
    ],
)
def test_impossible_seconds_are_refused_even_without_the_profile(made: Any, path: str, change: Any) -> None:
    trace, _, plan = made
    with pytest.raises(CertificationError, match="seconds"):
        certify(edited(plan, path, change), trace.path)


def test_a_profile_path_that_never_ends_is_not_read(made: Any) -> None:
    _, _, plan = made
    assert certifiable_profile(plan) is not None
    assert certifiable_profile(edited(plan, "inputs/profile/path", "/dev/zero")) is None


@pytest.mark.parametrize("reason", ["because we say so", "the profile has no expert_ffn", "no profile" * 40])
def test_a_part_has_no_seconds_for_the_reason_that_there_is(make_trace: Any, make_profile: Any, reason: str) -> None:
    profile, trace = make_profile(cases=("all_to_all", "all_gather", "expert_ffn")), make_trace(samples=40)
    plan = make_plan(trace, profile)
    certify(plan, trace.path, profile)
    with pytest.raises(CertificationError, match=r"options\.seconds\.missing|options\.seconds: 1 values"):
        certify(edited(plan, "options/seconds/missing/attention", reason), trace.path, profile)
