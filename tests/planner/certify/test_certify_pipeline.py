"""Pipeline degrees, their seconds and what their buffers drop recomputed by other code, and refused where edited."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeplan.planner.certify import certify
from moeplan.profilers.cluster import Cluster
from tests.planner.makers import assert_refused, edited, parsed, planned, seconds, training

Made = tuple[Any, Path, Any]
REPLICAS = {"strategy": "eplb", "redundant": 4}
HELD, BASELINES = "evaluation/held_out/contenders", "options/pipeline/baselines"
LOPSIDED = {"forward": [2] * 3, "backward": None, "shares": {"forward": [[0.4, 0.6]] * 3, "backward": None}}


def without(name: str) -> Any:
    """What leaves a key out."""
    return lambda value: {key: one for key, one in value.items() if key != name}


@pytest.mark.parametrize(
    ("cluster", "base", "changes"),
    [
        ("1x4", None, {}),
        ("2x2", REPLICAS, {"joint": True}),
        ("3x1", {"strategy": "exflow", "dispatch_model": "standard"}, {"method": "paper", "full_duplex": True}),
        ("1x4", None, {"method": "robust", "fit_fraction": 1.0}),
        ("2x2", REPLICAS, {"method": "robust", "joint": True}),
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
        planned(trace, profile=profile, to=tmp_path / "base.json", **base)
        changes = {"on": tmp_path / "base.json"} | changes
    certificate = certify(planned(trace, "pipemoe", profile=profile, max_degree=8, **changes), trace.path, profile)
    assert {"degrees", "objective of pipeline", "verdict"} <= set(certificate.checks)
    assert "that max_degree, joint and full_duplex are what was asked for" in certificate.unchecked
    assert ("bound of pipeline" in certificate.checks) == (changes.get("method") != "unequal")
    assert certificate.largest_difference < 1e-11


@pytest.fixture
def trained(make_trace: Any, make_profile: Any, tmp_path: Path) -> Callable[..., Made]:
    """A trace of training, a profile, and a plan whose layers have more chunks backward than forward."""
    trace = training(make_trace(samples=60, tokens=100), tmp_path)
    asked = {"profile": make_profile(cases=("expert_ffn", "attention")), "max_degree": 4, "links": ("intra=0.03:20",)}
    return lambda **changes: (trace, asked["profile"], planned(trace, "pipemoe", "1x4", **asked | changes))


@pytest.mark.parametrize("capacity_factor", [None, 1.37])
@pytest.mark.parametrize("changes", [{}, {"method": "robust"}, {"method": "unequal"}, {"joint": True}], ids=str)
def test_both_passes_and_the_calls_of_each_are_recomputed(trained: Any, changes: Any, capacity_factor: Any) -> None:
    trace, profile, plan = trained(capacity_factor=capacity_factor, **changes)
    assert certify(plan, trace.path, profile).largest_difference < 1e-11
    decision = plan.decisions.pipeline
    assert (decision.forward == decision.backward) == ("joint" in changes)


def test_degrees_of_which_neither_divides_the_other_are_refused(trained: Any) -> None:
    trace, profile, plan = trained()
    worse, paper = {"forward": [3] * 3, "backward": [2] * 3}, f"{BASELINES}/paper"
    shares = {"forward": [[0.3, 0.7]] * 3, "backward": [[0.5, 0.5]] * 3}
    uneven = {"forward": [2] * 3, "backward": [2] * 3, "shares": shares}
    for path, change, words in (
        ("decisions/pipeline", uneven, "degrees of plan: .* cut each other unevenly"),
        (paper, lambda x: x | worse, "degrees of paper: .* 3 chunks forward and 2"),
        ("decisions/pipeline", worse, "degrees of plan: .* 3 chunks forward and 2"),
    ):
        assert_refused(edited(plan, path, change), trace.path, profile, words=words)


@pytest.fixture(scope="module")
def made(make_trace: Any, make_profile: Any) -> Made:
    """A trace, a profile, and the plan made from both."""
    trace, profile = make_trace(samples=96, tokens=200), make_profile(cases=("expert_ffn", "attention"))
    asked: dict[str, Any] = {"profile": profile, "max_degree": 8, "samples_per_step": 8}
    return trace, profile, planned(trace, "pipemoe", "1x4", ("intra=0.05:20",), **asked)


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("decisions/pipeline/backward", [1, 1, 1], "passes other than"),
        (f"{BASELINES}/one_degree/forward", lambda x: [x[0] % 8 + 1] * 3, "one_degree/standard: .* the plan says"),
        (f"{BASELINES}/paper/forward", [2], "degrees of paper: not one a layer"),
        (BASELINES, {}, "the contenders are"),
        ("options/pipeline/a2a_ffn_overlap_degree/0", lambda x: x % 8 + 1, "a2a_ffn_overlap_degree: others take fewer"),
        ("options/pipeline/a2a_ffn_overlap_degree/0", 33, "a2a_ffn_overlap_degree: others take fewer"),
        ("options/pipeline/a2a_ffn_overlap_degree", [2], "a2a_ffn_overlap_degree: not one a layer"),
        ("options/pipeline/max_degree", 1, "above 1"),
        ("options/pipeline/max_degree", 65_536, "expected at most 1,024"),
        ("options/pipeline/full_duplex", True, "plan/standard: moe_s: the plan says"),
        ("options/pipeline/placement", "base", "placement 'base'"),
        ("options/pipeline/method", "paper", "degrees of .*; the contenders are"),
        ("decisions/pipeline/capacity_factor", 1.5, "degree_1: shares or a capacity"),
        (f"{BASELINES}/paper/capacity_factor", 1.5, "paper: shares or a capacity"),
        ("decisions/pipeline", LOPSIDED, "degrees of plan: shares or a capacity"),
        ("options/pipeline/forward/dispatch_s/0", lambda x: x * 2, "dispatch_s of other chunks"),
        ("options/pipeline/whole/experts_s", [], "experts_s of other chunks"),
        ("options/pipeline/backward_pass", {"dispatch_s": [], "experts_s": [], "combine_s": []}, "stages of a pass"),
        (f"{HELD}/0/metrics", without("moe_s"), "what times it gives"),
        ("outcome/pipeline/objective/name", "step_s", "expected the least moe_s"),
        ("outcome", {}, r"outcomes of \[\]"),
        ("options/seconds/extrapolated", lambda x: {**x, "moe_s": 0.987}, "extrapolated moe_s"),
        ("strategies", [], r"strategies \[\]"),
    ],
)
def test_an_edited_claim_is_refused(made: Made, path: str, change: Any, words: str) -> None:
    trace, profile, plan = made
    assert_refused(edited(plan, path, change), trace.path, profile, words=words)


def test_degrees_that_others_beat_are_refused_with_a_true_objective(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=60, tokens=200), make_profile("2x2", noise=0.3)
    exact, paper = (
        planned(trace, "pipemoe", profile=profile, method=method, max_degree=8).model_dump(mode="json")
        for method in ("exact", "paper")
    )
    options = paper["options"]["pipeline"] | {"method": "exact"}
    options["baselines"]["paper"] = options["baselines"].pop("exact")
    paper["options"]["pipeline"] = options
    for one in (one for part in paper["evaluation"].values() for one in part["contenders"]):
        one["name"] = "paper" if one["name"] == "exact" else one["name"]
    assert_refused(parsed(paper), trace.path, profile, words="others take fewer")
    options = exact["options"]["pipeline"]
    options |= {"method": "robust", "baselines": options["baselines"] | {"exact": exact["decisions"]["pipeline"]}}
    for part in exact["evaluation"].values():
        part["contenders"].append(part["contenders"][0] | {"name": "exact"})
    assert_refused(parsed(exact), trace.path, profile, words="robust degree")


@pytest.fixture(scope="module")
def uneven(make_trace: Any, make_profile: Any) -> Made:
    """A plan of unequal chunks."""
    trace, profile = make_trace(samples=32, tokens=400), make_profile("1x2", noise=0.0)
    plan = planned(trace, "pipemoe", profile=profile, method="unequal", fit_fraction=1.0, max_degree=8)
    certify(plan, trace.path, profile)
    return trace, profile, plan


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("decisions/pipeline", without("shares"), "degrees of plan: shares"),
        ("decisions/pipeline/shares/forward/0", lambda x: [x[1], x[0], *x[2:]], "plan/standard: .* the plan says"),
        ("options/pipeline/forward/experts_s/0/0", lambda x: x * 1.001, "experts_s of chunk 0 of layer 0"),
        ("options/pipeline/forward/combine_s/1", lambda x: x[:1], "combine_s of other chunks"),
        (f"{BASELINES}/exact", LOPSIDED, "degrees of exact: shares"),
        ("options/pipeline/joint", True, "unequal with joint"),
    ],
)
def test_edited_shares_are_refused(uneven: Made, path: str, change: Any, words: str) -> None:
    trace, profile, plan = uneven
    assert_refused(edited(plan, path, change), trace.path, profile, words=words)


@pytest.mark.parametrize("method", ["exact", "unequal"])
def test_a_dropped_share_is_recounted_even_without_a_profile(make_trace: Any, make_profile: Any, method: str) -> None:
    trace, profile = make_trace(samples=60, tokens=60, unrouted=0.05), make_profile("2x2")
    plan = planned(trace, "pipemoe", profile=profile, capacity_factor=0.9, max_degree=5, method=method)
    assert 0.05 < seconds(plan, "plan/standard", "dropped_share") < 0.5
    for given in (profile, None):
        certify(plan, trace.path, given)
        for path, change in ((".dropped_share.value", lambda x: x * 0.9), ("", without("dropped_share"))):
            forged = edited(plan, f"{HELD}.2.metrics{path}", change)
            words = r"degree_1/standard: (dropped_share|metrics|seconds)|values"
            assert_refused(forged, trace.path, given, words=words)


def test_a_plan_without_a_capacity_may_not_claim_to_drop(made: Made) -> None:
    trace, profile, plan = made
    claimed = {"dropped_share": {"value": 0.0, "low": None, "high": None}}
    forged = edited(plan, "evaluation/fit/contenders/0/metrics", lambda x: x | claimed)
    assert_refused(forged, trace.path, profile, words="metrics")


def test_a_capacity_that_every_contender_claims_is_recounted(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=60, tokens=60), make_profile("2x2")
    plan = planned(trace, "pipemoe", profile=profile, capacity_factor=1.37, max_degree=8)
    value = plan.model_dump(mode="json")
    for one in (value["decisions"]["pipeline"], *value["options"]["pipeline"]["baselines"].values()):
        one["capacity_factor"] = 2.0
    assert_refused(parsed(value), trace.path, profile, words="plan/standard: .* the plan says")


def test_without_the_profile_degrees_and_seconds_are_listed_as_unchecked_and_without_a_trace_all(made: Made) -> None:
    trace, _, plan = made
    certificate = certify(plan, trace.path)
    listed = {"degrees, their objective and their bound", "predicted seconds (give the plan's profile)"}
    assert listed <= {*certificate.unchecked}
    assert "metrics of every contender" in certificate.checks
    assert certify(plan).checks == ["gap of pipeline"]


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (f"{HELD}/0/metrics", without("moe_s"), "what times it"),
        (f"{HELD}/1/metrics", lambda x: x | {"moe_backward_s": x["moe_s"]}, "what times it"),
        (f"{HELD}/0/metrics/moe_s", lambda x: {**x, "low": x["high"], "high": x["low"]}, "rising interval"),
        ("options/seconds/missing", lambda x: x | {"experts": "lost"}, "expected each of"),
        ("model/dtype_bytes", None, "no hidden_size or dtype_bytes"),
    ],
)
def test_impossible_seconds_are_refused_without_a_trace(made: Made, path: str, change: Any, words: str) -> None:
    assert_refused(edited(made[2], path, change), words=words)


def test_a_link_that_is_not_the_profiles_is_listed_as_unchecked(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=96, tokens=200), make_profile("1x4")
    for cluster, told in ((None, False), (Cluster.parse("1x4", ["intra=10:5"]), True)):
        plan = planned(trace, "pipemoe", cluster, profile=profile, samples_per_step=8)
        unchecked = certify(plan, trace.path, profile).unchecked
        assert ("link intra, which is not the profile's" in unchecked) is told
        structure = certify(plan, profile=profile).unchecked
        assert structure == (["link intra, which is not the profile's"] if told else [])
