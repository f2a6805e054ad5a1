"""What `moeplan compare` says beside its table: what was left out, what fills no step, and which plans do not pay."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moeplan.planner.compare.comparison import Comparison, compare
from moeplan.planner.compare.report import as_dict, compare_report
from moeplan.planner.reports.remarks import remarks
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import load


def planned(trace: Any, path: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {"strategy": "exflow", "trace": str(trace.path), "cluster": Cluster.parse("2x2")}
    make(Request(**settings | changes)).save(path)
    return path


def said_of(found: Comparison) -> str:
    screen = Console(file=io.StringIO(), width=400)
    compare_report(found, screen)
    return screen.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    return make_trace(samples=130, tokens=12)


@pytest.fixture(scope="module")
def plan(trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned(trace, tmp_path_factory.mktemp("plans") / "exflow.json")


def test_samples_that_a_plan_was_fitted_to_are_left_out_and_that_is_said(trace: Any, plan: Path) -> None:
    found, evaluation = compare([plan], trace.path), load(plan).evaluation
    assert evaluation is not None
    fitted = evaluation.fit.num_samples
    assert 0 < fitted < 130
    assert f"left out  {fitted} samples that a plan was fitted to" in said_of(found)
    assert "ALL samples" not in said_of(found)
    assert (as_dict(found)["num_fitted_left_out"], as_dict(found)["judged_on_fitted"]) == (fitted, False)
    assert f"{130 - fitted} samples" in said_of(found).splitlines()[0]


def test_where_all_samples_were_fitted_none_is_left_out_and_less_is_to_be_expected(trace: Any, tmp_path: Path) -> None:
    found = compare([planned(trace, tmp_path / "all.json", fit_fraction=1.0)], trace.path)
    assert "ALL samples were fitted by these plans: expect less on others" in said_of(found)
    assert "left out" not in said_of(found)
    assert (as_dict(found)["num_fitted_left_out"], as_dict(found)["judged_on_fitted"]) == (0, True)


def test_on_another_trace_nothing_is_left_out_and_samples_that_fill_no_step_are_counted(
    make_trace: Any, plan: Path
) -> None:
    said = said_of(compare([plan], make_trace(samples=150, columns=("sample",), seed=3).path))
    assert "9 step(s), 6 sample(s) fill none\n" in said  # 16 samples a step: 4 a device
    assert "left out" not in said
    assert "ALL samples" not in said
    even = said_of(compare([plan], make_trace(samples=160, columns=("sample",), seed=3).path))
    assert "10 step(s)\n" in even
    assert "fill none" not in even


def test_a_plan_that_says_nothing_of_steps_is_judged_in_those_of_4_samples_a_device(trace: Any, tmp_path: Path) -> None:
    import json

    whole = planned(trace, tmp_path / "whole.json", samples_per_step=10)
    bare = {**json.loads(whole.read_text()), "options": {}, "evaluation": None, "verdict": None}
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    sizes = [compare([tmp_path / f"{name}.json"], trace.path).samples_per_step for name in ("whole", "bare")]
    assert sizes == [10, 4 * 4]


def test_a_plan_that_paid_and_does_not_is_told_from_one_that_never_did(
    make_trace: Any, trace: Any, tmp_path: Path
) -> None:
    plan = planned(trace, tmp_path / "copies.json", objective="copies")
    plain = planned(trace, tmp_path / "plain.json", strategy="contiguous")
    found = compare([plan, plain], make_trace(samples=150, seed=3).path)
    first, second = (replace(one, verdict=one.verdict.model_copy(update={"value": "none"})) for one in found.compared)
    said = said_of(replace(found, compared=(first, second)))
    assert f"{plan} NO LONGER PAYS: " in said
    assert f"{plain} DOES NOT PAY: " in said
    pays = replace(first, verdict=first.verdict.model_copy(update={"value": "benefit"}))
    assert f"{plan} pays: " in said_of(replace(found, compared=(pays, second)))


def test_a_placement_that_gives_nothing_beside_coherence_never_paid(trace: Any, tmp_path: Path) -> None:
    in_order = planned(trace, tmp_path / "in-order.json", time_limit_s=1e-9)
    found = compare([in_order], trace.path)
    assert f"{in_order} DOES NOT PAY: " in said_of(found)
    assert found.failing == [str(in_order)]
    plan = load(in_order)
    assert plan.verdict is not None
    assert plan.verdict.value == "benefit"
    assert plan.evaluation is not None
    assert any("coherence needs no such plan" in line for line in remarks(plan, plan.evaluation.judging))


def test_what_a_plan_gained_when_it_was_solved_is_over_what_it_is_held_against_now(trace: Any, plan: Path) -> None:
    found, evaluation = compare([plan], trace.path), load(plan).evaluation
    assert evaluation is not None
    of = {one.label: one.metrics["device_copies"].value for one in evaluation.judging.contenders}
    gain = of["contiguous/coherent"] - of["plan/coherent"]
    assert found.compared[0].verdict.against == "contiguous/coherent"
    words = f"{gain:.3f} fewer" if gain > 0 else f"{-gain:.3f} more"
    assert f"than contiguous, coherent; {words} when it was solved" in said_of(found)
    told = as_dict(found)["plans"][0]
    assert told["gain_when_solved_over_same"] == pytest.approx(gain)
    assert told["gain_when_solved"]["value"] == pytest.approx(of["contiguous/standard"] - of["plan/coherent"])


def with_values(found: Comparison, value: float, *suffixes: str) -> Comparison:
    """A comparison whose only plan saves copies, with another value of its metrics that end so."""
    pays = found.compared[0].verdict.model_copy(update={"value": "benefit", "metric": "device_copies"})
    ours, *others = found.part.contenders
    metrics = {
        name: one.model_copy(update={"value": value}) if name.endswith(suffixes) else one
        for name, one in ours.metrics.items()
    }
    part = found.part.model_copy(update={"contenders": (ours.model_copy(update={"metrics": metrics}), *others)})
    return replace(found, part=part, compared=(replace(found.compared[0], verdict=pays),))


def test_fewer_copies_that_take_longer_are_told_so(trace: Any, make_profile: Any, tmp_path: Path) -> None:
    profile = make_profile("2x2", cases=("all_to_all",))
    found = compare([planned(trace, tmp_path / "timed.json", objective="copies")], trace.path, profile=profile)
    for seconds, slower in ((1e-9, False), (9.0, True)):
        assert ("fewer copies, not faster" in said_of(with_values(found, seconds, "_s"))) == slower


def test_fewer_copies_that_are_more_bytes_with_k_and_v_are_told_so(trace: Any, plan: Path) -> None:
    found = compare([plan], trace.path)
    of = {one.label: one.metrics for one in found.part.contenders}
    back = sum(of["contiguous/standard"][f"{kind}_bytes"].value for kind in ("intra", "inter"))
    stays = sum(of[str(plan) + "/coherent"][f"{kind}_bytes"].value for kind in ("intra", "inter"))
    for more, told in ((1.0, False), (1.02, True)):
        said = "of contiguous, standard: fewer copies, not fewer bytes"
        assert (said in said_of(with_values(found, more * back - stays, "kv_bytes"))) == told
    assert found.compared[0].verdict.against == "contiguous/coherent"  # which gathers as much


def test_bytes_are_not_compared_where_those_of_copies_are_unknown(trace: Any, plan: Path) -> None:
    found = compare([plan], trace.path)
    known = [
        one.model_copy(update={"metrics": {name: of for name, of in one.metrics.items() if name[:5] != "intra"}})
        for one in found.part.contenders
    ]
    found = replace(found, part=found.part.model_copy(update={"contenders": tuple(known)}))
    assert "not fewer bytes" not in said_of(with_values(found, 1e12, "kv_bytes"))
