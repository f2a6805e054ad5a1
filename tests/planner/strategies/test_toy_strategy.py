"""A strategy from outside solves, compares, is shown and certified, by rows of registries alone."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import UsageError
from moeplan.planner.certify import certify
from moeplan.planner.compare import compare
from moeplan.planner.report.compare import as_dict
from moeplan.planner.request import Request
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import load
from tests.planner.makers import assert_refused, edited, figures, planned, said
from tests.planner.strategies import rotation


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        rotation.register(patch.setitem)
        yield


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    """Experts three further in each layer."""
    return make_trace(samples=80)


@pytest.fixture(scope="module")
def path(trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("plan") / "plan.json"
    planned(trace, "rotation", most_slots=5, to=target)
    return target


@pytest.fixture(scope="module")
def plan(path: Path) -> Any:
    return load(path)


def test_its_plan_holds_its_decision_and_is_judged_by_its_metric_against_today(plan: Any) -> None:
    assert plan.decisions.names == ("rotation",)
    assert plan.options["rotation"] == {"tried": 6}
    judged = figures(plan.evaluation.judging)
    assert [*judged] == ["plan/standard", "contiguous/standard", "by 1/standard"]
    ours, theirs, _ = (metrics["far_share"] for metrics in judged.values())
    assert (plan.verdict.metric, plan.verdict.against) == ("far_share", "contiguous/standard")
    assert plan.verdict.gain.value == pytest.approx(theirs - ours)


def test_it_is_compared_beside_others(trace: Any, path: Path, plan: Any, tmp_path: Path) -> None:
    planned(trace, "eplb", to=tmp_path / "eplb.json")
    comparison = compare([path, tmp_path / "eplb.json"], trace.path)
    assert comparison.compared[0].verdict == plan.verdict
    assert all("far_share" in one["metrics"] for one in as_dict(comparison)["part"]["contenders"])
    assert [one.verdict.metric for one in comparison.compared] == ["far_share", "balance"]


def test_it_is_certified_until_it_is_edited(trace: Any, plan: Any) -> None:
    assert "objective of rotation" in certify(plan, trace.path).checks
    for path, change in (
        ("outcome.rotation.objective.value", lambda x: x * 0.99),
        ("evaluation.fit.contenders.0.metrics.far_share.value", lambda x: x * 0.99),
        ("verdict.gain.value", lambda x: x + 0.01),
    ):
        assert_refused(edited(plan, path, change), trace.path)


def test_screens_show_its_metric_its_remark_and_its_section(plan: Any) -> None:
    screen = said(plan)
    assert f"experts go {rotation.turn_of(plan)} slots further in each layer" in screen
    share, today = (figures(plan.evaluation.judging)[f"{one}/standard"]["far_share"] for one in ("plan", "contiguous"))
    assert "% share of copies between nodes (" in screen
    assert f"({100 * share:.1f} % against {100 * today:.1f} % today; " in screen
    assert "\nRotation\ntried 6 turns\n" in screen
    assert "far: share of the copies that go to other nodes" in screen


def test_its_flag_is_one_of_its_own() -> None:
    settings: dict[str, Any] = {"trace": "t", "cluster": Cluster.parse("2x2")}
    with pytest.raises(UsageError, match="--most-slots with --strategy eplb; it is a flag of rotation"):
        Request.of(strategy="eplb", most_slots=1, **settings)
    with pytest.raises(UsageError, match="--most-slots 65; expected 0 to 64"):
        Request.of(strategy="rotation", most_slots=65, **settings)


def test_the_command_line_has_it_with_its_flag(trace: Any, path: Path, tmp_path: Path) -> None:
    def run(*args: str) -> str:
        command = [sys.executable, rotation.__file__, *args]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120).stdout

    assert "\nrotation:\n  --most-slots <int>  Slots at most.  [default: 3]\n" in run("solve", "--help")
    run(
        "solve",
        "--strategy",
        "rotation",
        "--trace",
        str(trace.path),
        "--cluster",
        "2x2",
        "--most-slots",
        "5",
        "--samples-per-step",
        "16",
    )
    ours, theirs = (json.loads(one.read_text()) for one in (tmp_path / "plan.json", path))
    assert ours["decisions"] == theirs["decisions"]
    assert ours["evaluation"] == theirs["evaluation"]
    assert "slots further in each layer" in run("show", "plan.json")
    assert "objective of rotation" in run("certify", "plan.json", "--trace", str(trace.path))
