"""Pipeline degrees and their seconds recomputed by other code, and refused where they were edited."""

from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import CertificationError, InputError
from moeplan.files import sha256_json
from moeplan.planner.certify import certify
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load
from moeplan.runtime.plan import Plan, parse, save
from tests.planner.edits import edited
from tests.planner.makers import training


def make_plan(trace: Any, profile: Path, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"strategy": "pipemoe", "trace": str(trace.path), "cluster": load(profile).cluster}
    deepest = {"max_degree": 8} if changes.get("strategy", "pipemoe") == "pipemoe" else {}
    return solve(Request.of(**settings | {"profile": profile} | deepest | changes))


@pytest.mark.parametrize(
    ("cluster", "base", "changes"),
    [
        ("1x4", None, {}),
        ("2x2", {"strategy": "eplb", "redundant": 4}, {"joint": True}),
        ("3x1", {"strategy": "exflow", "dispatch_model": "standard"}, {"method": "paper", "full_duplex": True}),
        ("1x4", None, {"method": "robust", "fit_fraction": 1.0}),
        ("2x2", {"strategy": "eplb", "redundant": 4}, {"method": "robust", "joint": True}),
        ("2x2", None, {"method": "unequal", "full_duplex": True}),
        ("2x2", None, {"capacity_factor": 1.37}),
        ("1x4", None, {"capacity_factor": 0.7, "method": "unequal"}),
    ],
    ids=str,
)
def test_every_figure_of_a_fresh_plan_is_recomputed(
    make_trace: Any, make_profile: Any, tmp_path: Path, cluster: str, base: Any, changes: Any
) -> None:
    trace, profile = make_trace(samples=60, tokens=60, unrouted=0.05), make_profile(cluster)
    if base is not None:
        save(make_plan(trace, profile, **base), tmp_path / "base.json")
        changes = {"on": tmp_path / "base.json"} | changes
    certificate = certify(make_plan(trace, profile, **changes), trace.path, profile)
    assert {"degrees", "objective of pipeline", "verdict"} <= set(certificate.checks)
    assert "that max_degree, joint and full_duplex are what was asked for" in certificate.unchecked
    assert ("bound of pipeline" in certificate.checks) == (changes.get("method") != "unequal")
    assert certificate.largest_difference < 1e-11


APART = [
    {},
    {"method": "robust"},
    {"method": "unequal"},
    {"capacity_factor": 1.37},
    {"capacity_factor": 1.37, "method": "unequal"},
]


@pytest.mark.parametrize("changes", APART, ids=str)
def test_both_passes_and_the_calls_that_each_causes_are_recomputed(
    make_trace: Any, make_profile: Any, tmp_path: Path, changes: Any
) -> None:
    trace, profile, plan = trained(make_trace, make_profile, tmp_path, **changes)
    assert certify(plan, trace.path, profile).largest_difference < 1e-11
    decision = plan.decisions.pipeline
    assert decision is not None
    assert decision.forward != decision.backward


def test_one_degree_for_both_passes_is_recomputed(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    trace, profile, plan = trained(make_trace, make_profile, tmp_path, joint=True)
    assert certify(plan, trace.path, profile).largest_difference < 1e-11
    decision = plan.decisions.pipeline
    assert decision is not None
    assert decision.forward == decision.backward


def test_degrees_of_which_neither_divides_the_other_are_refused(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, profile, plan = trained(make_trace, make_profile, tmp_path)
    worse = edited(plan, "decisions/pipeline", {"forward": [3] * 3, "backward": [2] * 3}, hashed=True)
    uneven = {"forward": [[0.3, 0.7]] * 3, "backward": [[0.5, 0.5]] * 3}
    shares = {"forward": [2] * 3, "backward": [2] * 3, "shares": uneven}
    with pytest.raises(CertificationError, match=r"degrees of plan: .* cut each other unevenly"):
        certify(edited(plan, "decisions/pipeline", shares, hashed=True), trace.path, profile)
    paper = edited(plan, "options/pipeline/baselines/paper/backward", [2] * 3)
    paper = edited(paper, "options/pipeline/baselines/paper/forward", [3] * 3)
    with pytest.raises(CertificationError, match=r"degrees of paper: .* 3 chunks forward and 2"):
        certify(paper, trace.path, profile)
    with pytest.raises(CertificationError, match=r"degrees of plan: .* 3 chunks forward and 2"):
        certify(worse, trace.path, profile)


def trained(make_trace: Any, make_profile: Any, folder: Path, **changes: Any) -> tuple[Any, Path, Plan]:
    """A trace of training, a profile, and a plan whose layers have more chunks backward than forward."""
    trace = training(make_trace(samples=60, tokens=100), folder)
    profile, cluster = make_profile(cases=("expert_ffn", "attention")), Cluster.parse("1x4", ["intra=0.03:20"])
    return trace, profile, make_plan(trace, profile, **{"cluster": cluster, "max_degree": 4} | changes)


@pytest.fixture(scope="module")
def made(make_trace: Any, make_profile: Any) -> tuple[Any, Path, Plan]:
    """A trace, a profile, and the plan made from both."""
    trace, profile = make_trace(samples=96, tokens=200), make_profile(cases=("expert_ffn", "attention"))
    slow = Cluster.parse("1x4", ["intra=0.05:20"])
    return trace, profile, make_plan(trace, profile, samples_per_step=8, cluster=slow)


HELD = "evaluation/held_out/contenders"
LOPSIDED = {"forward": [2] * 3, "backward": None, "shares": {"forward": [[0.4, 0.6]] * 3, "backward": None}}


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("decisions/pipeline/forward/1", lambda x: x % 8 + 1, "plan/standard: .* the plan says"),
        ("decisions/pipeline/backward", [1, 1, 1], "passes other than"),
        (
            "options/pipeline/baselines/one_degree/forward",
            lambda x: [one % 8 + 1 for one in x],
            "one_degree/standard: .* the plan says",
        ),
        ("options/pipeline/baselines/degree_1/forward/0", 2, "degree_1/standard: .* the plan says"),
        (
            "options/pipeline/baselines/paper/forward/0",
            lambda x: x % 8 + 1,
            "paper/standard: dispatch_s: the plan says",
        ),
        ("options/pipeline/baselines/paper/forward", [2], "degrees of paper: not one a layer"),
        ("options/pipeline/baselines", {}, "the contenders are"),
        ("options/pipeline/a2a_ffn_overlap_degree/0", lambda x: x % 8 + 1, "a2a_ffn_overlap_degree: others take fewer"),
        ("options/pipeline/a2a_ffn_overlap_degree", [2], "a2a_ffn_overlap_degree: not one a layer"),
        ("options/pipeline/max_degree", 1, "above 1"),
        ("options/pipeline/max_degree", 65_536, "expected at most 1,024"),
        ("options/pipeline/max_degree", "x", "options.pipeline: 1 values"),
        ("options/pipeline/full_duplex", True, "plan/standard: moe_s: the plan says"),
        ("options/pipeline/backward", 2.0, "what times it gives"),
        ("options/pipeline/placement", "base", "placement 'base'"),
        ("options/pipeline/method", "paper", "degrees of .*; the contenders are"),
        ("decisions/pipeline/capacity_factor", 1.5, "degree_1: shares or a capacity"),
        ("options/pipeline/baselines/paper/capacity_factor", 1.5, "paper: shares or a capacity"),
        ("decisions/pipeline", LOPSIDED, "degrees of plan: shares or a capacity"),
        ("options/pipeline/forward/dispatch_s/0/0", lambda x: x * 1.001, "dispatch_s of chunk 0 of layer 0"),
        ("options/pipeline/forward/dispatch_s/0", lambda x: x * 2, "dispatch_s of other chunks"),
        ("options/pipeline/whole/experts_s/2/0", lambda x: x * 1.001, "experts_s of chunk 0 of layer 2"),
        ("options/pipeline/whole/experts_s", [], "experts_s of other chunks"),
        ("options/pipeline/backward_pass", {"dispatch_s": [], "experts_s": [], "combine_s": []}, "stages of a pass"),
        (f"{HELD}/0/metrics/moe_s/value", lambda x: x * 0.999, "plan/standard: moe_s"),
        (f"{HELD}/1/metrics/dispatch_s/low", lambda x: x * 0.999, "contiguous/standard: dispatch_s low"),
        (f"{HELD}/2/metrics/step_s/high", lambda x: x * 1.001, "degree_1/standard: step_s high"),
        (f"{HELD}/3/metrics/balance/value", lambda x: x * 1.001, "one_degree/standard: balance"),
        (
            f"{HELD}/0/metrics",
            lambda x: {name: found for name, found in x.items() if name != "moe_s"},
            "what times it gives",
        ),
        (HELD, lambda x: x[:-1], "contenders .*; expected"),
        ("outcome/pipeline/objective/value", lambda x: x * 0.999, "better than its bound"),
        ("outcome/pipeline/objective/name", "step_s", "expected the least moe_s"),
        ("outcome/pipeline/bound_kind", "magic", "'magic'"),
        ("outcome", {}, r"outcomes of \[\]"),
        ("options/seconds/sources/experts", "expert_ffn/bf16", "expert_ffn/bf16"),
        ("options/seconds/extrapolated", lambda x: {**x, "moe_s": 0.987}, "extrapolated moe_s"),
        ("verdict/against", "paper/standard", "against paper/standard"),
        ("verdict/metric", "balance", "gain of the verdict"),
        ("verdict/gain/low", lambda x: x + 1e-6, "gain low"),
        ("verdict", None, "verdict None"),
        ("options/pipeline/forward/dispatch_s/0/0", 1e13, "options.pipeline: 1 values"),
        ("strategies", ["eplb"], r"strategies \['eplb'\]"),
        ("strategies", ["pipemoe", "pipemoe"], "'pipemoe', 'pipemoe'"),
        ("strategies", [], r"strategies \[\]"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_edited_claim_is_refused(made: Any, path: str, change: Any, words: str) -> None:
    trace, profile, plan = made
    with pytest.raises(CertificationError, match=words):
        certify(edited(plan, path, change, hashed=True), trace.path, profile)


def test_degrees_that_others_beat_are_refused_though_their_objective_is_true(
    make_trace: Any, make_profile: Any
) -> None:
    trace, profile = make_trace(samples=60, tokens=100), make_profile("2x2")
    paper = make_plan(trace, profile, method="paper")
    assert paper.outcome["pipeline"].gap
    value = paper.model_dump(mode="json")
    value["options"]["pipeline"]["method"] = "exact"
    value["options"]["pipeline"]["baselines"]["paper"] = value["options"]["pipeline"]["baselines"].pop("exact")
    for part in value["evaluation"].values():
        for one in part["contenders"]:
            one["name"] = "paper" if one["name"] == "exact" else one["name"]
    with pytest.raises(CertificationError, match="others take fewer"):
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
    ("path", "change", "words"),
    [
        (
            "decisions/pipeline",
            lambda x: {name: x[name] for name in ("forward", "backward")},
            "degrees of plan: shares",
        ),
        ("decisions/pipeline/shares/forward/0", lambda x: [x[1], x[0], *x[2:]], "plan/standard: .* the plan says"),
        ("options/pipeline/forward/experts_s/0/0", lambda x: x * 1.001, "experts_s of chunk 0 of layer 0"),
        ("options/pipeline/forward/combine_s/1", lambda x: x[:1], "combine_s of other chunks"),
        ("options/pipeline/baselines/exact", LOPSIDED, "degrees of exact: shares"),
        ("options/pipeline/joint", True, "unequal with joint"),
        ("outcome/pipeline/bound", 0.0, "gap of pipeline"),
        ("outcome/pipeline/objective/value", lambda x: x * 0.999, "objective: the plan says"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_edited_shares_are_refused(uneven: Any, path: str, change: Any, words: str) -> None:
    trace, profile, plan = uneven
    certify(plan, trace.path, profile)
    with pytest.raises(CertificationError, match=words):
        certify(edited(plan, path, change, hashed=True), trace.path, profile)


def test_a_capacity_that_every_contender_claims_is_recounted(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=60, tokens=60), make_profile("2x2")
    value = make_plan(trace, profile, capacity_factor=1.37).model_dump(mode="json")
    for one in (value["decisions"]["pipeline"], *value["options"]["pipeline"]["baselines"].values()):
        one["capacity_factor"] = 2.0
    value["plan_sha256"] = sha256_json({part: value[part] for part in ("decisions", "cluster", "model")})
    with pytest.raises(CertificationError, match=r"plan/standard: .* the plan says"):
        certify(parse(value, "edited"), trace.path, profile)


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
        ("model/dtype_bytes", None, "no hidden_size or dtype_bytes"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_impossible_seconds_are_refused_without_trace_and_profile(
    made: Any, path: str, change: Any, words: str
) -> None:
    with pytest.raises(CertificationError, match=words):
        certify(edited(made[2], path, change, hashed=True))


def test_a_negative_time_of_solving_is_refused_where_a_plan_is_read(made: Any) -> None:
    with pytest.raises(InputError, match="wall_s"):
        edited(made[2], "outcome/pipeline/wall_s", -1.0)


def test_a_link_that_is_not_the_profiles_is_listed_as_unchecked(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=96, tokens=200), make_profile("1x4")
    for cluster, told in ((load(profile).cluster, False), (Cluster.parse("1x4", ["intra=10:5"]), True)):
        plan = make_plan(trace, profile, samples_per_step=8, cluster=cluster)
        unchecked = certify(plan, trace.path, profile).unchecked
        assert ("link intra, which is not the profile's" in unchecked) is told
