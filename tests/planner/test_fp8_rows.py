"""Plans whose hidden vectors travel as fp8 rows: what they decide, what they are judged beside, what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import UsageError
from moeplan.planner.certify import certify
from moeplan.planner.document import Table
from moeplan.planner.options import SecondsOptions
from moeplan.planner.report.plan import plan_sections
from moeplan.planner.report.trust import trust_section
from moeplan.profilers.profile import load, save
from moeplan.profilers.series import ELEMENT_BYTES
from moeplan.runtime.exports import export
from moeplan.runtime.wire import copy_bytes
from tests.builders import known, model, series
from tests.planner.makers import assert_refused, edited, judged, planned, said, training

CARRIED = ("exflow", "eplb", "contiguous")


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    return make_trace(samples=96)


@pytest.fixture(scope="module")
def profile(make_profile: Any) -> Any:
    return make_profile("2x2", noise=0.0)


@pytest.mark.parametrize("strategy", CARRIED)
def test_all_but_today_travel_as_the_plan_and_bytes_shrink_while_copies_do_not(
    trace: Any, profile: Path, strategy: str
) -> None:
    plan = planned(trace, strategy, profile=profile, wire="fp8")
    assert (plan.decisions.wire, plan.dispatch_model) == ("fp8", "standard")
    rows = judged(plan)
    ours, exact, usual, alone = (
        rows[f"{name}/standard"] for name in ("plan", "plan, exact rows", "contiguous", "contiguous, fp8")
    )
    less = known(copy_bytes(plan.model, "fp8")) / known(plan.model.copy_bytes)
    assert less < 0.6
    for wired, whole in ((ours, exact), (alone, usual)):
        assert wired["device_copies"] == whole["device_copies"]
        assert wired["inter_bytes"] == pytest.approx(less * whole["inter_bytes"])
        assert wired["experts_s"] == whole["experts_s"]
        assert wired["step_s"] < whole["step_s"]
    assert {*rows} >= {"eplb, fp8/standard"}
    certificate = certify(plan, trace.path, profile)
    assert certificate.replayed
    assert "fp8 rows alone" in said(plan)


@pytest.fixture(scope="module")
def encoding(profile: Path, trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile with what encoding and decoding rows takes: 1 ms, and 1 ns a byte."""
    sizes = [{"rows": rows, "hidden": hidden} for rows in (4, 16, 64, 256) for hidden in (32, 64, 128)]
    rows, made = series("fp8_rows", dtype="bf16", sizes=sizes, a_s=1e-3), load(profile)
    assert ELEMENT_BYTES["bf16"] == trace.model.dtype_bytes
    path = tmp_path_factory.mktemp("encoding") / "profile.json"
    save(made.model_copy(update={"series": {**made.series, rows.key: rows}}), path)
    return path


def test_a_plan_of_fp8_rows_says_by_what_encoding_is_timed_and_how_wrong_that_is(trace: Any, encoding: Path) -> None:
    plan = planned(trace, "eplb", profile=encoding, wire="fp8")
    options, rows = SecondsOptions.of(plan), judged(plan)
    assert options.sources["encoding"] == "fp8_rows/bf16"
    assert "encoding" not in options.missing
    assert rows["plan/standard"]["step_s"] > rows["plan, exact rows/standard"]["step_s"] + 2 * 3 * 0.9e-3
    assert "encoding by fp8_rows/bf16" in said(plan)
    assert "encoding fp8 rows takes no time" not in said(plan)
    assert certify(plan, trace.path, encoding).replayed
    (table,) = trust_section(plan, Path("plan.json"), certify(plan), load(encoding)).body
    assert isinstance(table, Table)
    names, words = (column.cells for column in table.columns)
    assert "sizes held out" in words[names.index("encoding timed by")]


def test_what_encodes_rows_stands_only_in_plans_of_which_a_contender_has_a_wire(trace: Any, encoding: Path) -> None:
    plan = planned(trace, "eplb", profile=encoding)
    options = SecondsOptions.of(plan)
    assert not {"encoding", "folding"} & {*options.sources, *options.missing, *options.noisy, *options.other_dtype}
    assert "fp8" not in said(plan)


def test_a_plan_of_fp8_rows_whose_profile_has_none_says_that_encoding_takes_no_time(trace: Any, profile: Path) -> None:
    words = "encoding fp8 rows takes no time here: the profile has no fp8_rows; measure again: moeplan profile"
    assert words in said(planned(trace, "eplb", profile=profile, wire="fp8"))
    plain = planned(trace, "eplb", profile=profile)
    assert "encoding" not in SecondsOptions.of(plain).missing
    assert "no time here" not in said(plain)


def test_a_plan_without_fp8_rows_is_what_it_was(trace: Any, profile: Path) -> None:
    plain, wired = (planned(trace, "eplb", profile=profile, wire=wire) for wire in (None, "fp8"))
    assert plain.decisions.wire is None
    assert plain.decisions.placement == wired.decisions.placement
    assert judged(plain)["plan/standard"] == judged(wired)["plan, exact rows/standard"]
    assert not [label for label in judged(plain) if "fp8" in label or "exact" in label]
    assert "fp8" not in said(plain)


def test_a_decision_on_top_keeps_fp8_rows_and_may_add_them(trace: Any, profile: Path, tmp_path: Path) -> None:
    for first, then in (("fp8", None), (None, "fp8")):
        planned(trace, "eplb", profile=profile, wire=first, to=tmp_path / "base.json")
        plan = planned(trace, "pipemoe", profile=profile, on=tmp_path / "base.json", wire=then)
        assert plan.decisions.wire == "fp8"
        assert plan.strategies == ("eplb", "pipemoe")
        assert judged(plan)["plan/standard"]["moe_s"] < judged(plan)["plan, exact rows/standard"]["moe_s"]
        certify(plan, trace.path, profile, folder=tmp_path)
    planned(trace, "exflow", profile=profile, wire="fp8", to=tmp_path / "force.json")
    again = planned(trace, "exflow", profile=profile, previous=tmp_path / "force.json")
    assert again.decisions.wire == "fp8"


def test_auto_compares_candidates_of_fp8_rows_and_says_what_these_add(trace: Any, profile: Path) -> None:
    plan = planned(trace, "auto", profile=profile, wire="fp8")
    tried = plan.options["auto"]["tried"]
    assert plan.decisions.wire == "fp8"
    assert {one["dispatch_model"] for one in tried} == {"standard"}
    assert not any(one["engines"] for one in tried)
    text = said(plan)
    assert len(plan.strategies) == 1 or "what each part adds, in % of today: fp8 rows" in text
    assert [*plan_sections(plan)]


def test_degrees_are_chosen_by_the_seconds_of_fp8_rows(trace: Any, profile: Path, tmp_path: Path) -> None:
    run = training(trace, tmp_path / "run")
    plain, wired = (planned(run, "pipemoe", profile=profile, wire=wire) for wire in (None, "fp8"))
    assert wired.outcome["pipeline"].objective.value < plain.outcome["pipeline"].objective.value


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [("netmoe", {}), ("exflow", {"dispatch_model": "coherent"}), ("auto", {"dispatch_model": "migrating"})],
)
def test_other_dispatch_models_are_refused_by_name(trace: Any, strategy: str, settings: Any) -> None:
    with pytest.raises(
        UsageError, match=rf"fp8 rows with --strategy {strategy}, under \w+ dispatch; expected standard"
    ):
        planned(trace, strategy, wire="fp8", **settings)


def test_samples_that_move_are_refused_on_top_and_engines_are_given_no_such_plan(trace: Any, tmp_path: Path) -> None:
    plan = planned(trace, "eplb", wire="fp8", to=tmp_path / "plan.json")
    with pytest.raises(UsageError, match="fp8 rows with --strategy netmoe, under migrating dispatch"):
        planned(trace, "netmoe", on=tmp_path / "plan.json")
    with pytest.raises(UsageError, match="the plan sends hidden vectors as fp8 rows, and sglang in a form of its own"):
        export(plan, "sglang", tmp_path / "out")
    with pytest.raises(UsageError, match="--engine sglang with --wire fp8"):
        planned(trace, "auto", wire="fp8", engine="sglang")


def test_a_plan_that_denies_its_fp8_rows_does_not_certify(trace: Any) -> None:
    plan = planned(trace, "eplb", wire="fp8")
    denied = edited(plan, "decisions", lambda made: {key: one for key, one in made.items() if key != "wire"})
    assert_refused(denied, trace.path, words="contenders")


def test_bytes_of_a_copy_are_known_where_the_models_are() -> None:
    sizes = model(hidden_size=64, dtype_bytes=2)
    assert [copy_bytes(sizes, wire) for wire in (None, "fp8")] == [128, 68]
    assert copy_bytes(replace(sizes, dtype_bytes=None), "fp8") is None
