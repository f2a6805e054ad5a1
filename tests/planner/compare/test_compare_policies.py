"""Sample policies compared: alone, on placements, and beside plans whose samples stay."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moeplan.errors import InputError, UsageError
from moeplan.planner.compare.comparison import Comparison, compare
from moeplan.planner.compare.report import compare_report
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Contender, load
from moeplan.traces.schema import TokenBatch, TraceMeta
from moeplan.traces.writer import TraceWriter
from tests.planner.netmoe.made import generated


def planned(trace: Any, path: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {"strategy": "netmoe", "trace": str(trace.path), "cluster": Cluster.parse("2x2")}
    make(Request(**settings | changes)).save(path)
    return path


def contender(found: Comparison, label: str) -> Contender:
    return next(one for one in found.part.contenders if one.label == label)


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    return make_trace(samples=130, tokens=12)


@pytest.fixture(scope="module")
def home(trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, one on a placement, and plans that leave samples where they are."""
    folder = tmp_path_factory.mktemp("policies")
    planned(trace, folder / "policy.json")
    planned(trace, folder / "eplb.json", strategy="eplb")
    planned(trace, folder / "on.json", on=folder / "eplb.json")
    planned(trace, folder / "exflow.json", strategy="exflow", objective="copies")
    planned(trace, folder / "contiguous.json", strategy="contiguous")
    return folder


@pytest.mark.parametrize(("name", "against"), [("policy", "contiguous/standard"), ("on", "base/standard")])
@pytest.mark.parametrize("timed", [False, True])
def test_on_its_own_trace_a_policy_has_the_figures_and_the_gain_that_it_was_solved_with(
    trace: Any, home: Path, make_profile: Any, tmp_path: Path, name: str, against: str, timed: bool
) -> None:
    profile = make_profile("2x2") if timed else None
    path = home / f"{name}.json"
    if timed:
        on = home / "eplb.json" if name == "on" else None
        path = planned(trace, tmp_path / "timed.json", profile=profile, on=on)
    found, plan = compare([path], trace.path, profile=profile), load(path)
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    solved = {one.label: dict(one.metrics) for one in plan.evaluation.held_out.contenders}
    ours, base = found.part.contenders
    moved = {key: metric for key, metric in solved["plan/migrating"].items() if key != "samples_moved"}
    assert dict(ours.metrics) == moved
    assert dict(base.metrics) == {k: v for k, v in solved[against].items() if k != "samples_moved"}
    assert found.compared[0].verdict.gain == plan.verdict.gain == found.compared[0].claimed  # type: ignore[union-attr]
    assert found.compared[0].verdict.value == plan.verdict.value  # type: ignore[union-attr]
    assert found.num_fitted == plan.evaluation.fit.num_samples


@pytest.mark.parametrize("columns", [("sample",), ("sample", "step", "source_rank")])
def test_beside_a_policy_plans_whose_samples_stay_are_counted_step_by_step_as_its_own_baseline_is(
    make_trace: Any, home: Path, columns: tuple[str, ...]
) -> None:
    new = make_trace(samples=100, seed=4, columns=columns, ranks=4)
    policy, plain, exflow = (home / f"{name}.json" for name in ("policy", "contiguous", "exflow"))
    alone, both = compare([policy], new.path), compare([policy, plain, exflow], new.path)
    base = contender(alone, "contiguous/standard").metrics
    walked = contender(both, f"{plain}/standard").metrics
    assert {name: walked[name] for name in base} == dict(base)
    assert contender(both, "contiguous/standard").metrics == walked
    versus = both.compared[1].against_first
    assert versus is not None
    assert versus.metric == "inter_bytes"
    assert versus.gain.value == pytest.approx(-both.compared[0].verdict.gain.value)
    assert both.compared[0].verdict == alone.compared[0].verdict
    assert both.compared[2].verdict.metric == "device_copies"
    assert both.compared[2].verdict.gain.value > 0


def test_a_policy_pays_only_above_two_per_cent(make_trace: Any, home: Path) -> None:
    found = compare([home / "policy.json", home / "exflow.json"], make_trace(samples=100, seed=5).path)
    assert [one.verdict.at_least for one in found.compared] == [0.02, 0.0]
    gain, base = found.compared[0].verdict.gain, contender(found, "contiguous/standard").metrics["inter_bytes"]
    pays = gain.low is not None and gain.low > 0.02 * base.value
    assert (found.compared[0].verdict.value == "benefit") == pays


def test_one_that_gains_too_little_is_told_what_pays(make_trace: Any, home: Path) -> None:
    found = compare([home / "policy.json"], make_trace(samples=100, seed=5).path)
    (one,) = found.compared
    little = replace(one, verdict=one.verdict.model_copy(update={"value": "none"}))
    screen = Console(file=io.StringIO(), width=300)
    compare_report(replace(found, compared=(little,)), screen)
    said = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "NO LONGER PAYS" in said
    assert "when it was solved; up to 2% does not pay for moving samples" in said


def test_policies_are_compared_on_counts_and_placements_are_not(tmp_path: Path) -> None:
    ours, new = (generated(tmp_path / name, alpha=1.0, seed=seed) for name, seed in (("a", 0), ("b", 1)))
    paths = [planned(ours, tmp_path / "sum.json"), planned(ours, tmp_path / "paper.json", method="paper")]
    found = compare(paths, new.path)
    assert found.failing == []
    assert found.part.num_steps == 16
    assert [one.verdict.against for one in found.compared] == ["contiguous/standard"] * 2


def test_a_predictor_that_is_missing_or_another_is_one_clear_error(trace: Any, home: Path, tmp_path: Path) -> None:
    plan = load(home / "policy.json")
    assert plan.decisions.sample_policy is not None
    assert plan.decisions.sample_policy.predictor is not None
    (tmp_path / "policy.json").write_bytes((home / "policy.json").read_bytes())
    with pytest.raises(InputError, match="the plan's predictor"):
        compare([tmp_path / "policy.json"], trace.path)
    (tmp_path / plan.decisions.sample_policy.predictor.file).write_bytes(b"another")
    with pytest.raises(InputError, match="another predictor than the plan's"):
        compare([tmp_path / "policy.json"], trace.path)


def test_samples_in_several_steps_are_moved_alone_and_refused_beside_placements(
    trace: Any, home: Path, tmp_path: Path
) -> None:
    with TraceWriter(tmp_path / "again", TraceMeta(form="tokens", model=trace.model, recorder="test")) as writer:
        for batch in trace.batches():
            step = (batch.position % 4).astype(np.int32)
            writer.append(TokenBatch(step, batch.sample, batch.position, batch.source_rank, batch.phase, batch.ids))
    assert compare([home / "policy.json"], tmp_path / "again").part.num_steps == 4
    with pytest.raises(UsageError, match="samples run in several steps"):
        compare([home / "policy.json", home / "eplb.json"], tmp_path / "again")


def test_a_policy_needs_samples_and_no_pipeline_beside_it(
    make_trace: Any, make_profile: Any, trace: Any, home: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="samples were not recorded"):
        compare([home / "policy.json"], make_trace(samples=40, columns=("step",)).path)
    profile = make_profile("2x2")
    piped = planned(trace, tmp_path / "piped.json", strategy="pipemoe", profile=profile)
    with pytest.raises(UsageError, match=r"policy.json is for migrating dispatch"):
        compare([piped, home / "policy.json"], trace.path, profile=profile)
