"""Every figure of a plan recomputed by other code, and refused where it was edited."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import CertificationError, MismatchError
from moeplan.planner.certify import Certificate, certifiable_profile, certifiable_trace, certify
from moeplan.traces.schema import PHASES
from tests.planner.makers import assert_refused, edited, parsed, planned, rewritten

HELD = "evaluation.held_out.contenders"
FIT = "evaluation.fit.contenders"
Made = tuple[Any, Path | None, Any]
UNTIMED = ("all_to_all", "all_gather", "expert_ffn")  # attention is


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy": "eplb", "redundant": 8},
        {"strategy": "contiguous", "redundant": 4},
        {"redundant": 4, "cluster": "2x2"},
        {"dispatch_model": "standard"},
        {"fit_fraction": 1.0},
        {"samples_per_step": 3, "seed": 5},
        {"phases": ("prefill",)},
    ],
    ids=str,
)
@pytest.mark.parametrize("columns", [("sample",), ("step",), ()], ids=str)
def test_every_figure_of_a_fresh_plan_is_recomputed(make_trace: Any, changes: Any, columns: Any) -> None:
    trace = make_trace(samples=80, tokens=40, unrouted=0.05, columns=columns)
    plan = planned(trace, **{"cluster": "1x4"} | changes)
    certificate = certify(plan, trace.path)
    assert certificate.figures > 20
    assert certificate.largest_difference < 1e-12
    assert "verdict" in certificate.checks
    if "objective" in certificate.checks:
        unbounded = {"bound": None, "bound_kind": None, "gap": None, "status": "feasible"}
        forged = edited(plan, "outcome.placement", lambda x: x | unbounded)
        forged = edited(forged, "outcome.placement.objective.value", lambda x: x * 1.001)
        assert_refused(forged, trace.path, words="objective: the plan says")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_hidden_vectors_go_home_where_steps_are_of_whole_samples(
    make_trace: Any, make_profile: Any, tmp_path: Path, phase: str
) -> None:
    def phased(batch: Any) -> dict[str, Any]:
        return {"phase": np.full(len(batch), PHASES.index(phase), np.int8)}

    trace, profile = rewritten(make_trace(samples=80, tokens=40), tmp_path / "trace", phased), make_profile("1x4")
    size: dict[str, Any] = {"concurrency": 8} if phase == "decode" else {"samples_per_step": 8}
    plan = planned(trace, cluster="1x4", dispatch_model="coherent", profile=profile, **size)
    certify(plan, trace.path, profile)
    coherent = [one for one in plan.evaluation.fit.contenders if one.dispatch_model == "coherent"]
    assert coherent
    assert all(("home_s" in one.metrics) == (phase == "prefill") for one in coherent)
    assert all("counts_s" in one.metrics for one in coherent)


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
    plan = planned(trace, profile=profile, **changes)
    certificate = certify(plan, trace.path, profile)
    assert "step_s" in plan.evaluation.fit.contenders[0].metrics
    assert {"profile hash", "predicted seconds", "verdict"} <= set(certificate.checks)
    assert "solver seconds, status, method and backend" in certificate.unchecked
    assert certificate.largest_difference < 1e-12


def test_an_expert_that_a_token_names_twice_is_no_pair(make_trace: Any, tmp_path: Path) -> None:
    def twice(batch: Any) -> Any:
        batch.ids[::3, :, 1] = batch.ids[::3, :, 0]
        return {"ids": batch.ids}

    trace = rewritten(make_trace(samples=40), tmp_path, twice)
    for dispatch in ("coherent", "standard"):
        plan = planned(trace, cluster="1x4", dispatch_model=dispatch, objective="copies")
        assert "objective" in certify(plan, trace.path).checks


@pytest.fixture(scope="module")
def plain(make_trace: Any) -> Made:
    """A trace, no profile, and the plan made from it."""
    trace = make_trace(samples=40, tokens=20)
    return trace, None, planned(trace, cluster="1x4")


@pytest.fixture(scope="module")
def timed(make_trace: Any, make_profile: Any) -> Made:
    """A trace, a profile, and the plan made from both."""
    trace, profile = make_trace(samples=80, tokens=120), make_profile()
    return trace, profile, planned(trace, profile=profile)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (f"{HELD}.0.metrics", lambda x: {**x, "speed": {"value": 9.0, "low": None, "high": None}}),
        (f"{HELD}.0.metrics", {}),
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
        ("options.evaluation.unit", "step"),
        ("options.evaluation.home", "source_rank"),
        ("options.evaluation.phases", ["decode", "train"]),
        ("options.placement.strategy", "eplb"),
        ("inputs.base", {"path": "base.json", "sha256": "0" * 64}),
        (HELD, lambda x: x[:-1]),
        (HELD, lambda x: [*x, x[-1]]),
        ("evaluation.held_out", None),
    ],
)
def test_a_figure_that_the_trace_does_not_give_is_refused(plain: Made, path: str, change: Any) -> None:
    trace, _, plan = plain
    assert_refused(edited(plan, path, change), trace.path)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (f"{HELD}.0.metrics", lambda x: {name: one for name, one in x.items() if name != "attention_s"}),
        (f"{HELD}.0.metrics", lambda x: {name: one for name, one in x.items() if name != "step_s"}),
        ("verdict.metric", "device_copies"),
        ("options.seconds.extrapolated", {}),
        ("options.seconds", {}),
        ("options.seconds.missing", 3),
        ("options.seconds.missing", {"attention": "the profile has no attention"}),
        ("options.seconds.other_dtype", []),
    ],
)
def test_edited_seconds_are_refused(timed: Made, path: str, change: Any) -> None:
    trace, profile, plan = timed
    assert_refused(edited(plan, path, change), trace.path, profile)


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (f"{HELD}.0.metrics.step_s", {"value": -1e-9, "low": None, "high": None}, "seconds"),
        (f"{HELD}.0.metrics.experts_s", {"value": 1e-3, "low": 5.0, "high": 1.0}, "seconds"),
        (f"{HELD}.0.metrics.magic_s", {"value": 1e-3, "low": None, "high": None}, "seconds"),
        (f"{HELD}.1.metrics.kv_s", {"value": 1e-3, "low": None, "high": None}, "seconds"),
        ("verdict.value", lambda x: "none" if x == "benefit" else "benefit", "verdict"),
    ],
)
def test_what_contradicts_itself_is_refused_without_a_profile(timed: Made, path: str, change: Any, words: str) -> None:
    trace, _, plan = timed
    assert_refused(edited(plan, path, change), trace.path, words=words)


def test_what_is_not_recomputed_is_listed(plain: Made, timed: Made) -> None:
    trace, _, plan = plain
    bare = certify(plan.model_copy(update={"evaluation": None, "verdict": None}), trace.path)
    assert any(line.startswith("decisions, objective and bound") for line in bare.unchecked)
    alone = certify(plan)
    assert alone.checks == ["placement rules", "gap of placement"]
    assert "structure only" in alone.summary("plan.json")
    replicated = certify(planned(trace, cluster="1x4", redundant=4), trace.path)
    assert "objective (expected_hops_kept)" in replicated.unchecked
    assert "objective" not in replicated.checks
    assert replicated.details()[1].startswith("unchecked ")
    trace, _, plan = timed
    untimed = certify(plan, trace.path)
    listed = {"predicted seconds (give the plan's profile)", "the gain of the verdict", "the profile's hash"}
    assert listed <= {*untimed.unchecked}
    assert "metrics of every contender" in untimed.checks


def test_seconds_by_links_alone_are_recomputed_from_the_plan(make_trace: Any) -> None:
    trace = make_trace(samples=80)
    plan = planned(trace, "exflow", "2x2", ("intra=100:2", "inter=10:9"))
    assert "predicted seconds" in certify(plan, trace.path).checks
    assert_refused(edited(plan, f"{HELD}.0.metrics.dispatch_inter_s.value", lambda x: x * 1.001), trace.path)
    few = make_trace(samples=14)  # in each part fewer than make an interval
    single = planned(few, "exflow", "1x4", ("intra=100:2",), samples_per_step=500)
    assert single.evaluation.fit.contenders[0].metrics["dispatch_s"].low is None  # a single step
    assert certify(single, few.path).largest_difference < 1e-12


def test_a_part_is_missing_for_the_reason_that_there_is(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=40), make_profile(cases=UNTIMED)
    plan = planned(trace, profile=profile)
    assert_refused(edited(plan, "verdict.metric", "exchange_s"), trace.path, profile, words="gain of the verdict")
    for reason in ("because we say so", "the profile has no expert_ffn", "no profile" * 40):
        forged = edited(plan, "options.seconds.missing.attention", reason)
        assert_refused(forged, trace.path, profile, words=r"options\.seconds(\.missing|: 1 values)")


def test_a_plan_whose_seconds_were_cut_out_with_its_verdict_is_refused(timed: Made) -> None:
    trace, profile, plan = timed
    value = plan.model_dump(mode="json")
    value["options"].pop("seconds")
    for part in value["evaluation"].values():
        for contender in part["contenders"]:
            contender["metrics"] = {k: v for k, v in contender["metrics"].items() if not k.endswith("_s")}
    value["verdict"] = planned(trace, cluster=plan.cluster).model_dump(mode="json")["verdict"]
    for given in (profile, None):
        assert_refused(parsed(value), trace.path, given, words=r"options\.seconds")


def test_another_trace_or_profile_is_refused_by_its_hash(make_trace: Any, make_profile: Any, timed: Made) -> None:
    trace, _, plan = timed
    with pytest.raises(MismatchError, match="hash"):
        certify(plan, make_trace(seed=2).path)
    for one in (plan, planned(trace, cluster="1x4")):
        with pytest.raises(MismatchError, match="hash"):
            certify(one, trace.path, make_profile(noise=0.2))


def test_a_plan_finds_its_own_trace_and_profile_by_hash(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    folder, profile = tmp_path / "trace", make_profile()
    shutil.copytree(make_trace().path, folder)
    plan = planned(type("Trace", (), {"path": folder}), profile=profile)
    assert (certifiable_trace(plan), certifiable_profile(plan)) == (str(folder), str(profile))
    near = edited(plan, "inputs.trace.path", "trace")  # relative to where it was solved, and to the plan
    assert certifiable_trace(near) is None
    assert certifiable_trace(near, tmp_path) == str(folder)
    assert certifiable_profile(edited(plan, "inputs.profile.path", "/dev/zero")) is None  # which never ends
    shutil.copy(next(folder.glob("*.parquet")), folder / "part-0-1-1.parquet")
    profile.write_text(profile.read_text() + "\n")
    assert (certifiable_trace(plan), certifiable_profile(plan)) == (None, None)
    shutil.rmtree(folder)
    profile.unlink()
    assert (certifiable_trace(plan), certifiable_profile(plan)) == (None, None)
    assert certifiable_profile(edited(plan, "inputs.profile", None)) is None


def test_a_recount_that_is_no_number_agrees_with_nothing() -> None:
    with pytest.raises(CertificationError, match="the plan says 1, the recount nan"):
        Certificate().agree("balance", 1.0, float("nan"))
