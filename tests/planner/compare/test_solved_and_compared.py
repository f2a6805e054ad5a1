"""Solve and compare judge alike, and compare judges any mix of plans as it judges each alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.planner.compare import Comparison, compare
from moeplan.planner.evaluate.metrics import METRICS, MetricSpec
from moeplan.planner.report.compare import as_dict
from moeplan.runtime.plan import Metric, load
from moeplan.traces.reader import Trace

Shelf = Callable[[str], Path]
KINDS = ("coherent", "coherent_s", "standard", "replicated", "contiguous", "even_s", "piped_s", "capped_s", "dead")
MOVING = ("moving", "moving_on", "moving_on_s", "moving_piped_s")


def metrics_of(found: Comparison) -> dict[str, dict[str, Metric]]:
    """Label to metrics, paths as names without endings."""
    contenders = found.part.contenders
    return {f"{Path(one.name).name}/{one.dispatch_model}": dict(one.metrics) for one in contenders}


def close(ours: Metric, theirs: Metric) -> bool:
    ends = [(one.value, one.low, one.high) for one in (ours, theirs)]
    return all(
        (one is None) == (other is None) and (one is None or one == pytest.approx(other, rel=1e-9, abs=1e-15))
        for one, other in zip(*ends, strict=True)
    )


@pytest.mark.parametrize("name", [*KINDS, *MOVING])
def test_on_its_own_trace_a_plan_has_the_verdict_and_the_figures_that_it_was_solved_with(
    trace: Trace, profile: Path, shelf: Shelf, name: str
) -> None:
    plan = load(shelf(name))
    found = compare([shelf(name)], trace.path, profile=profile if name.endswith("_s") else None)
    ours, theirs = found.compared[0].verdict, plan.verdict
    today = "contiguous without 3/standard" if name == "dead" else "contiguous/standard"
    assert theirs is not None
    assert (ours.value, ours.metric, ours.against, ours.at_least) == (
        theirs.value,
        theirs.metric,
        today,
        theirs.at_least,
    )
    assert theirs.against == today
    assert close(ours.gain, theirs.gain)
    assert found.compared[0].claimed == theirs.gain
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    solved = {one.label: one.metrics for one in plan.evaluation.held_out.contenders}
    shared = {label for label in metrics_of(found) if label in solved}
    assert today in shared
    pairs = [(metrics_of(found)[label], solved[label]) for label in shared]
    pairs.append((metrics_of(found)[f"{name}.json/{plan.dispatch_model}"], solved[f"plan/{plan.dispatch_model}"]))
    for compared, judged in pairs:
        assert compared.keys() == judged.keys()
        assert all(close(metric, judged[key]) for key, metric in compared.items())
    assert (found.num_fitted, found.seen) == (plan.evaluation.fit.num_samples, False)


def test_a_policy_on_a_pipeline_is_judged_with_its_chunks(trace: Trace, profile: Path, shelf: Shelf) -> None:
    found = metrics_of(compare([shelf("moving_piped_s"), shelf("piped_s")], trace.path, profile=profile))
    whole = "moving_piped_s.json at degree 1/migrating"
    stays = "moving_piped_s.json, samples staying/standard"
    assert {whole, stays} < found.keys()
    assert found[stays] == found["piped_s.json/standard"]
    parts = {name for name in found["moving_piped_s.json/migrating"] if name.endswith("_s")}
    assert {"moe_s", "dispatch_s", "exchange_s", "step_s"} <= parts


def test_any_mix_of_plans_stands_in_one_table_with_the_figures_that_each_has_alone(
    new: Trace, profile: Path, shelf: Shelf
) -> None:
    names = ("coherent", "piped_s", "moving", "moving_on_s", "moving_piped_s", "replicated", "capped_s", "roomy_s")
    paths = [shelf(name) for name in names]
    together = compare(paths, new.path, profile=profile)
    assert [Path(one.path) for one in together.compared] == paths
    assert {one.verdict.against for one in together.compared} == {"contiguous/standard"}
    assert all("exchange_s" in metrics for metrics in metrics_of(together).values())
    for path, joint in zip(paths, together.compared, strict=True):
        alone = compare([path], new.path, profile=profile)
        for label, metrics in metrics_of(alone).items():
            beside = metrics_of(together)[label]
            shared = metrics.keys() & beside.keys()
            assert {"device_copies", "balance", "step_s", "exchange_s"} <= shared
            for name in shared:
                assert beside[name].value == pytest.approx(metrics[name].value, rel=1e-9), (label, name)
        assert joint.verdict.metric == alone.compared[0].verdict.metric
        assert joint.verdict.gain.value == pytest.approx(alone.compared[0].verdict.gain.value, rel=1e-6, abs=1e-12)


@pytest.fixture
def loneliness(monkeypatch: pytest.MonkeyPatch) -> MetricSpec:
    """A metric in a row of its own: tokens that visit no other device, over steps."""
    spec = MetricSpec(
        name="loneliness",
        column="lonely",
        noun="lonely tokens",
        meaning="tokens over the copies that they are sent in",
        unit="ratio",
        per="sample",
        needs="a trace of tokens",
        compute=lambda sums, _: {"": np.atleast_2d(sums.counts["tokens"] / (1 + sums.counts["device_copies"]))},
        better="more",
    )
    monkeypatch.setitem(METRICS, spec.name, spec)
    return spec


def test_a_metric_is_one_row(
    loneliness: MetricSpec, trace: Trace, planned: Callable[..., Path], tmp_path: Path
) -> None:
    path = planned(trace, "lonely.json", strategy="eplb")
    plan, found = load(path), compare([path], trace.path)
    assert plan.evaluation is not None
    contenders = [*plan.evaluation.fit.contenders, *plan.evaluation.judging.contenders, *found.part.contenders]
    for one in contenders:
        figure = one.metrics[loneliness.name]
        assert figure.low is not None
        assert figure.high is not None
        assert 0 < figure.low < figure.value < figure.high
    assert (
        metrics_of(found)["lonely.json/standard"][loneliness.name]
        == contenders[len(plan.evaluation.fit.contenders)].metrics[loneliness.name]
    )
    listed: Any = json.loads(json.dumps(as_dict(found)))["part"]["contenders"]
    assert all(loneliness.name in one["metrics"] for one in listed)
