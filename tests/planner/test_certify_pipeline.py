"""Pipeline degrees and their seconds recomputed by other code, and refused where they were edited."""

from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import CertificationError
from moeplan.planner.certify import certify
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load
from moeplan.runtime.plan import Plan, parse, save
from tests.planner.edits import edited


def make_plan(trace: Any, profile: Path, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"strategy": "pipemoe", "trace": str(trace.path), "cluster": load(profile).cluster}
    return solve(Request(**settings | {"profile": profile, "max_degree": 8} | changes))


@pytest.mark.parametrize(
    ("cluster", "base", "changes"),
    [
        ("1x4", None, {}),
        ("2x2", {"strategy": "eplb", "redundant": 4}, {"joint": True}),
        ("3x1", {"strategy": "exflow", "dispatch_model": "standard"}, {"method": "paper", "full_duplex": True}),
        ("1x4", None, {"method": "robust", "fit_fraction": 1.0}),
        ("2x2", {"strategy": "eplb", "redundant": 4}, {"method": "robust", "joint": True}),
        ("2x2", None, {"method": "unequal", "full_duplex": True}),
        ("2x2", None, {"capacity_factor": 1.3}),
        ("1x4", None, {"capacity_factor": 0.7, "method": "unequal"}),
    ],
    ids=str,
)
def test_every_figure_of_a_fresh_plan_is_recomputed(
    make_trace: Any, make_profile: Any, tmp_path: Path, cluster: str, base: Any, changes: Any
) -> None:
    trace, profile = make_trace(samples=60, tokens=60, unrouted=0.05), make_profile(cluster)
    if base is not None:
        save(make_plan(trace, profile, **{"max_degree": None} | base), tmp_path / "base.json")
        changes = {"on": tmp_path / "base.json"} | changes
    certificate = certify(make_plan(trace, profile, **changes), trace.path, profile)
    assert {"degrees", "objective of pipeline", "verdict"} <= set(certificate.checks)
    assert ("bound of pipeline" in certificate.checks) == (changes.get("method") != "unequal")
    assert certificate.largest_difference < 1e-11


@pytest.fixture(scope="module")
def made(make_trace: Any, make_profile: Any) -> tuple[Any, Path, Plan]:
    """A trace, a profile, and the plan made from both."""
    trace, profile = make_trace(samples=96, tokens=200), make_profile(cases=("expert_ffn", "attention"))
    slow = Cluster.parse("1x4", ["intra=0.05:20"])
    return trace, profile, make_plan(trace, profile, samples_per_step=8, cluster=slow)


HELD = "evaluation/held_out/contenders"


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("decisions/pipeline/forward/1", lambda x: x % 8 + 1),
        ("decisions/pipeline/backward", [1, 1, 1]),
        ("options/pipeline/baselines/one_degree/forward", lambda x: [one % 8 + 1 for one in x]),
        ("options/pipeline/baselines/degree_1/forward/0", 2),
        ("options/pipeline/baselines/paper/forward/0", lambda x: x % 8 + 1),
        ("options/pipeline/baselines/paper/forward", [2]),
        ("options/pipeline/baselines", {}),
        ("options/pipeline/a2a_ffn_overlap_degree/0", lambda x: x % 8 + 1),
        ("options/pipeline/a2a_ffn_overlap_degree", [2]),
        ("options/pipeline/max_degree", 1),
        ("options/pipeline/max_degree", "x"),
        ("options/pipeline/full_duplex", True),
        ("options/pipeline/backward", 2.0),
        ("options/pipeline/placement", "base"),
        ("options/pipeline/method", "paper"),
        ("options/pipeline/capacity_factor", 1.5),
        ("options/pipeline/shares", {"forward": [[0.5, 0.5]] * 3, "backward": None}),
        ("options/pipeline/forward/dispatch_s/0/0", lambda x: x * 1.001),
        ("options/pipeline/forward/dispatch_s/0", lambda x: x * 2),
        ("options/pipeline/whole/experts_s/2/0", lambda x: x * 1.001),
        ("options/pipeline/whole/experts_s", []),
        ("options/pipeline/backward_pass", {"dispatch_s": [], "experts_s": [], "combine_s": []}),
        (f"{HELD}/0/metrics/moe_s/value", lambda x: x * 0.999),
        (f"{HELD}/1/metrics/dispatch_s/low", lambda x: x * 0.999),
        (f"{HELD}/2/metrics/step_s/high", lambda x: x * 1.001),
        (f"{HELD}/3/metrics/balance/value", lambda x: x * 1.001),
        (f"{HELD}/0/metrics", lambda x: {name: found for name, found in x.items() if name != "moe_s"}),
        (HELD, lambda x: x[:-1]),
        ("outcome/pipeline/objective/value", lambda x: x * 0.999),
        ("outcome/pipeline/objective/name", "step_s"),
        ("outcome/pipeline/bound_kind", "magic"),
        ("outcome", {}),
        ("options/seconds/sources/experts", "expert_ffn/bf16"),
        ("options/seconds/extrapolated", lambda x: {**x, "moe_s": 0.987}),
        ("verdict/against", "paper/standard"),
        ("verdict/metric", "balance"),
        ("verdict/gain/low", lambda x: x + 1e-6),
        ("verdict", None),
        ("strategies", ["eplb"]),
        ("strategies", ["pipemoe", "pipemoe"]),
        ("strategies", []),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_edited_claim_is_refused(made: Any, path: str, change: Any) -> None:
    trace, profile, plan = made
    with pytest.raises(CertificationError):
        certify(edited(plan, path, change, hashed=True), trace.path, profile)


def test_degrees_that_others_beat_are_refused_though_their_objective_is_true(
    make_trace: Any, make_profile: Any
) -> None:
    trace, profile = make_trace(samples=60, tokens=100), make_profile("2x2")
    paper = make_plan(trace, profile, method="paper")
    assert paper.outcome["pipeline"].gap
    value = paper.model_dump(mode="json")
    value["options"]["pipeline"]["method"] = "exact"
    with pytest.raises(CertificationError):
        certify(parse(value, "edited"), trace.path, profile)


def test_a_robust_degree_that_another_beats_in_regret_is_refused(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=60, tokens=200), make_profile("2x2", noise=0.3)
    exact, robust = (make_plan(trace, profile, method=method) for method in ("exact", "robust"))
    assert exact.decisions.pipeline != robust.decisions.pipeline
    value = exact.model_dump(mode="json")
    value["options"]["pipeline"]["method"] = "robust"
    value["options"]["pipeline"]["baselines"]["exact"] = value["decisions"]["pipeline"]
    for part in value["evaluation"].values():
        part["contenders"].append(part["contenders"][0] | {"name": "exact"})
    with pytest.raises(CertificationError, match="robust degree"):
        certify(parse(value, "edited"), trace.path, profile)


@pytest.fixture(scope="module")
def uneven(make_trace: Any, make_profile: Any) -> tuple[Any, Path, Plan]:
    """A plan of unequal chunks."""
    trace, profile = make_trace(samples=32, tokens=400), make_profile("1x2", noise=0.0)
    return trace, profile, make_plan(trace, profile, method="unequal", fit_fraction=1.0)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("options/pipeline/shares", None),
        ("options/pipeline/shares/forward/0", lambda x: x[:-1]),
        ("options/pipeline/shares/forward/0", lambda x: [0.9 * share for share in x]),
        ("options/pipeline/shares/forward/0", lambda x: [x[1], x[0], *x[2:]]),
        ("options/pipeline/shares/backward", [[1.0]] * 3),
        ("options/pipeline/forward/experts_s/0/0", lambda x: x * 1.001),
        ("options/pipeline/forward/combine_s/1", lambda x: x[:1]),
        ("outcome/pipeline/bound", 0.0),
        ("outcome/pipeline/objective/value", lambda x: x * 0.999),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_edited_shares_are_refused(uneven: Any, path: str, change: Any) -> None:
    trace, profile, plan = uneven
    certify(plan, trace.path, profile)
    with pytest.raises(CertificationError):
        certify(edited(plan, path, change, hashed=True), trace.path, profile)


def test_without_the_profile_degrees_and_seconds_are_listed_as_unchecked(made: Any) -> None:
    trace, _, plan = made
    certificate = certify(plan, trace.path)
    assert "degrees, their objective and their bound" in certificate.unchecked
    assert "predicted seconds (give the plan's profile)" in certificate.unchecked
    assert "metrics of every contender" in certificate.checks


def test_without_a_trace_only_the_structure_is_checked(made: Any) -> None:
    assert certify(made[2]).checks == ["gap of pipeline"]


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (f"{HELD}/0/metrics", lambda x: {name: one for name, one in x.items() if name != "moe_s"}, "what times it"),
        (f"{HELD}/1/metrics", lambda x: x | {"moe_backward_s": x["moe_s"]}, "what times it"),
        (f"{HELD}/2/metrics", lambda x: x | {"kv_s": x["moe_s"]}, "what times it"),
        (f"{HELD}/3/metrics/moe_s/value", -1.0, "rising interval"),
        (f"{HELD}/0/metrics/moe_s", lambda x: {**x, "low": x["high"], "high": x["low"]}, "rising interval"),
        ("options/seconds/missing", lambda x: x | {"experts": "lost"}, "expected each of"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_impossible_seconds_are_refused_without_trace_and_profile(
    made: Any, path: str, change: Any, words: str
) -> None:
    with pytest.raises(CertificationError, match=words):
        certify(edited(made[2], path, change, hashed=True))
