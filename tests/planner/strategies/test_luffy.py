"""LUFFY as a strategy: what it is judged on and beside, its certificate, what a scene with padding says, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import UsageError
from moeplan.planner.certify import certify
from moeplan.planner.compare import compare
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.description import describe
from moeplan.profilers.fits.laws import AttentionLaw
from moeplan.profilers.profile import load, save
from tests.builders import known, measured_profile, series
from tests.planner.makers import assert_refused, edited, generated, judged, planned, said

LINKS = ("intra=100:2", "inter=10:5")
SIMPLER = ("dealt", "dealt by cost", "netmoe sum", "netmoe even", "netmoe bottleneck")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A described cluster whose attention weighs about as much as its exchanges."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    save(describe("2x2", LINKS, "300:900@64"), path)
    return path


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, whose attention takes a start and a call for each length, which were told apart."""
    path, profile = tmp_path_factory.mktemp("started") / "profile.json", describe("2x2", LINKS, "300:900@64")
    ((key, series),) = profile.series.items()
    fit = known(series.fit)
    assert isinstance(fit.model, AttentionLaw)
    law, axes = replace(fit.model, start_s=5e-6, call_s=2e-6), (*fit.axes, "calls")
    fit = replace(fit, axes=axes, model=law, measured=dict.fromkeys(axes, (0, 2**30)))
    save(profile.model_copy(update={"series": {key: series.model_copy(update={"fit": fit})}}), path)
    return path


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Samples of unequal length with preferences."""
    return generated(tmp_path_factory.mktemp("counts") / "trace", alpha=3.0, samples=128, uneven=True)


@pytest.fixture(scope="module")
def tokens(make_trace: Any) -> Any:
    return make_trace(samples=70, tokens=5)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("counts", {}),
        ("counts", {"numbers": "free"}),
        ("counts", {"batches": "padded", "numbers": "free"}),
        ("counts", {"batches": "padded", "room": 1.5}),
        ("counts", {"method": "paper", "candidates": 3}),
        ("tokens", {}),
        ("tokens", {"method": "paper", "fit_fraction": 1.0}),
    ],
)
def test_the_figures_of_a_plan_are_those_of_a_second_count(
    request: pytest.FixtureRequest, profile: Path, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    trace = request.getfixturevalue(kind)
    plan = planned(trace, "luffy", profile=profile, to=tmp_path / "plan.json", **settings)
    certificate = certify(plan, trace.path, profile, folder=tmp_path)
    assert certificate.largest_difference < 1e-9
    assert {"attention law", "objective and bound", "predicted seconds"} <= {*certificate.checks}
    assert plan.verdict.metric == "attention_exchange_s"


def test_the_plan_beats_what_weighs_either_alone_and_the_screen_says_by_how_much(
    counts: Any, profile: Path, tmp_path: Path
) -> None:
    plan = planned(counts, "luffy", profile=profile, to=tmp_path / "plan.json")
    rows = {label: row["attention_exchange_s"] for label, row in judged(plan).items()}
    ours, today = rows["plan/migrating"], rows["contiguous/standard"]
    simpler = {name: rows[f"{name}/{'standard' if name.startswith('dealt') else 'migrating'}"] for name in SIMPLER}
    assert ours < min(simpler.values()) < today
    assert ours < rows["paper/migrating"]
    options = plan.options["sample_policy"]
    for name, ways in (("over_dealt", SIMPLER[:2]), ("over_netmoe", SIMPLER[2:])):
        assert options[name]["value"] == pytest.approx(min(simpler[way] for way in ways) - ours)
    told = said(plan)
    best = min(SIMPLER[2:], key=simpler.__getitem__)
    assert f"netmoe by {best.split()[1]}, which weighs exchanges alone, takes" in told
    assert "LUFFY's own Algorithm 1 takes" in told
    assert "attention 300 ns a token, 900 ps a token squared" in told


@pytest.mark.parametrize("attended", [True, False])
def test_homes_weigh_attention_as_the_runtime_runs_it_or_say_that_a_profile_lacks_it(
    counts: Any, tmp_path: Path, attended: bool
) -> None:
    sizes = [
        {"batch": batch, "length": length, "hidden": 64, "calls": 1} for batch in (1, 16) for length in (16, 64, 256)
    ]
    timed = [series("attention", dtype="fp32", sizes=sizes, a_s=0.0, b_s=1e-11)]
    timed += [series("attended", dtype="fp32", sizes=sizes, a_s=0.0, b_s=4e-11)] * attended
    save(measured_profile(Cluster.parse("2x2", LINKS), *timed), tmp_path / "profile.json")
    plan = planned(counts, "luffy", profile=tmp_path / "profile.json", to=tmp_path / "plan.json")
    law = known(known(plan.decisions.sample_policy).attention)
    assert law.square_s == pytest.approx(64 * (4e-11 if attended else 1e-11), rel=0.02)
    told = " ".join(said(plan).split())
    assert ("attention of samples that move takes longer than these seconds" in told) == (not attended)
    assert ("by attended/fp32" in told) == attended
    certificate = certify(plan, counts.path, tmp_path / "profile.json", folder=tmp_path)
    assert certificate.largest_difference < 1e-9
    assert {"attention law", "predicted seconds"} <= {*certificate.checks}


@pytest.mark.parametrize("settings", [{}, {"numbers": "free"}, {"batches": "padded", "numbers": "free"}])
def test_the_start_of_a_device_is_told_from_its_calls(
    counts: Any, started: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    plan = planned(counts, "luffy", profile=started, to=tmp_path / "plan.json", **settings)
    law = known(known(plan.decisions.sample_policy).attention)
    assert (law.start_s, law.call_s) == pytest.approx((3e-6, 2e-6))
    certificate = certify(plan, counts.path, started, folder=tmp_path)
    assert certificate.largest_difference < 1e-9
    assert {"attention law", "objective and bound", "predicted seconds"} <= {*certificate.checks}
    assert "2 us a call, 3 us to start" in said(plan)


def test_padding_makes_everyone_slower_and_free_numbers_pay_then(counts: Any, profile: Path) -> None:
    packed, padded = (
        judged(planned(counts, "luffy", profile=profile, batches=batches, numbers="free"))
        for batches in ("packed", "padded")
    )
    for label in ("contiguous/standard", "netmoe even/migrating", "plan/migrating"):
        assert padded[label]["attention_s"] > packed[label]["attention_s"]
    equal = judged(planned(counts, "luffy", profile=profile, batches="padded"))
    assert padded["plan/migrating"]["attention_s"] < equal["plan/migrating"]["attention_s"]


def test_compare_pads_as_the_plan_says(counts: Any, profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = planned(counts, "luffy", profile=profile, batches="padded", numbers="free", to=path)
    again = compare([path], str(counts.path), profile=profile)
    rows = {one.label: one.metrics["attention_s"].value for one in again.part.contenders}
    assert rows[f"{path}/migrating"] == pytest.approx(judged(plan)["plan/migrating"]["attention_s"])


def test_without_attention_or_links_it_is_netmoe(counts: Any, profile: Path, make_profile: Any) -> None:
    for settings, mend in (
        ({"cluster": "2x2"}, "give --profile with both"),
        ({"cluster": "2x2", "links": LINKS}, "give --profile with both"),
        ({"profile": make_profile("2x2", cases=("all_to_all",))}, "no attention; join it with one that has"),
        ({"cluster": "2x2", "profile": make_profile("2x2", cases=("attention",))}, "give --link intra=GBps:us"),
    ):
        with pytest.raises(UsageError, match=rf"but .*{mend}.*; or --strategy netmoe, which weighs exchanges alone"):
            planned(counts, "luffy", **settings)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "decisions.sample_policy.attention.token_s",
            lambda seconds: 1.000001 * seconds,
            "attention token_s: the plan says",
        ),
        ("decisions.sample_policy.method", "sum", "with an attention law; expected joint or paper"),
        ("options.sample_policy.over_netmoe.value", 1.0, "gain over netmoe value: the plan says"),
        ("options.sample_policy.over_netmoe", None, "no over_dealt or over_netmoe"),
        ("outcome.sample_policy.bound_kind", "exact", "bound exact; expected min layer_s"),
        ("outcome.sample_policy.objective.value", lambda value: 1.001 * value, "objective: the plan says|gap"),
        ("outcome.sample_policy.bound", lambda bound: 1.001 * bound, "bound: the plan says|gap"),
    ],
)
def test_another_claim_is_refused(
    counts: Any, profile: Path, tmp_path: Path, path: str, value: object, message: str
) -> None:
    plan = planned(counts, "luffy", profile=profile, to=tmp_path / "plan.json")
    assert_refused(edited(plan, path, value), counts.path, profile, words=message, folder=tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"room": 0.5}, "--room 0.5; expected 1 to 1,000,000"),
        ({"candidates": 0}, "--candidates 0; expected at least 1"),
        ({"batches": "loose"}, "--attention-batches loose with --strategy luffy; expected packed or padded"),
    ],
)
def test_impossible_parameters_are_refused_by_flag(counts: Any, profile: Path, settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(counts, "luffy", profile=profile, **settings)


def test_a_profile_whose_attention_takes_hours_is_refused(counts: Any, started: Path, tmp_path: Path) -> None:
    profile, path = load(started), tmp_path / "profile.json"
    ((key, series),) = profile.series.items()
    fit = known(series.fit)
    assert isinstance(fit.model, AttentionLaw)
    changed = replace(fit, model=replace(fit.model, start_s=5e4))
    save(profile.model_copy(update={"series": {key: series.model_copy(update={"fit": changed})}}), path)
    with pytest.raises(UsageError, match=r"attention of \(.*measure attention again"):
        planned(counts, "luffy", profile=path)


@pytest.mark.parametrize("text", ["71", "71:23", "71:23@", "-1:2@64", "0:0@64", "1:1@0", "nan:1@64", "1e99:1@64"])
def test_attention_that_is_no_law_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="expected NS:PS@HIDDEN"):
        describe("2x2", LINKS, text)
