"""What counts as a benefit, what a screen says of it, and that a fit's objective is what the evaluator counts."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moeplan.errors import CertificationError
from moeplan.planner.certify import certify
from moeplan.planner.evaluate import Evaluated, verdict
from moeplan.planner.measures.metrics import Figures
from moeplan.planner.reports.plan import solve_report
from moeplan.planner.reports.remarks import remarks
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Evaluation, Metric, Part, Plan, Verdict
from moeplan.solvers.cost import inter_ratio
from moeplan.traces.reader import Trace
from tests.planner.edits import edited
from tests.planner.netmoe.made import generated, part_of, solved

MakeTrace = Callable[..., Trace]


def evaluated(ours: float, *, at_least: float) -> Evaluated:
    """A plan of so many bytes and seconds beside 100, each surely known."""
    nobody = Part(num_samples=1, num_tokens=1, num_steps=1, dropped_samples=0, contenders=())
    plan, base = (
        Figures(
            {"inter_bytes": value, "step_s": value, "attention_s": 1.0},
            {"inter_bytes": np.full(9, value), "step_s": np.full((1, 1, 9), value)},
        )
        for value in (ours, 100.0)
    )
    judged = {"plan/migrating": plan, "contiguous/standard": base}
    return Evaluated(Evaluation(fit=nobody, held_out=None), judged, None, at_least)


@pytest.mark.parametrize(
    ("ours", "at_least", "value"),
    [(99.4, 0.0, "benefit"), (99.4, 0.02, "none"), (98.0, 0.02, "none"), (97.9, 0.02, "benefit"), (101, 0.0, "none")],
)
def test_a_gain_pays_above_a_share_of_the_baseline(ours: float, at_least: float, value: str) -> None:
    one = evaluated(ours, at_least=at_least)
    for figures in one.judged.values():
        del figures.value["step_s"]
    found = verdict(one, "inter_bytes", "contiguous/standard")
    assert (found.value, found.at_least, found.metric) == (value, at_least, "inter_bytes")


def test_of_seconds_any_gain_pays() -> None:
    found = verdict(evaluated(99.4, at_least=0.02), "inter_bytes", "contiguous/standard")
    assert (found.value, found.at_least, found.metric) == ("benefit", 0.0, "step_s")


def test_a_verdict_of_an_older_plan_pays_from_any_gain_on() -> None:
    found = Verdict.model_validate(
        {"value": "benefit", "metric": "hop_cost", "against": "contiguous/standard", "gain": {"value": 1.0}}
    )
    assert found.at_least == 0


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return solved(generated(tmp_path_factory.mktemp("trace"), alpha=3.0, samples=96)).plan


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        ((0.006, 0.005, 0.007), "no benefit expected: 0.6% (0.5 to 0.7) fewer bytes between nodes than contiguous,"),
        ((-0.01, -0.02, -0.005), "no benefit expected: 1.0% (0.5 to 2.0) more bytes between nodes than contiguous,"),
        ((0.05, 0.04, 0.06), "benefit expected: 5.0% (4.0 to 6.0) fewer bytes between nodes than contiguous, standard"),
    ],
)
def test_a_gain_that_must_reach_a_share_is_told_as_one(moved: Plan, gain: Any, words: str) -> None:
    part = part_of(moved)
    base = part.contenders[-1].metrics["inter_bytes"].value
    value, low, high = (base * share for share in gain)
    told = Verdict(
        value="benefit" if gain[1] > 0.02 else "none",
        metric="inter_bytes",
        against="contiguous/standard",
        gain=Metric(value=value, low=low, high=high),
        at_least=0.02,
    )
    line = next(iter(remarks(moved.model_copy(update={"verdict": told}), part)))
    assert line.startswith(words)
    assert ("; under 2% does not pay for moving" in line) == (0 < gain[1] < 0.02)


def test_other_strategies_pay_from_any_gain_on(make_trace: MakeTrace) -> None:
    request = Request(strategy="exflow", trace=make_trace().path, cluster=Cluster.parse("1x2"))
    plan = make(request).plan
    assert plan.verdict is not None
    assert plan.verdict.at_least == 0
    with pytest.raises(CertificationError, match="exflow pays from any gain on"):
        certify(edited(plan, "verdict.at_least", 0.5))


@pytest.mark.parametrize("cluster", ["2x2", "1x4", "4x1"])
def test_the_objective_of_a_sample_policy_is_what_its_combines_carry(make_trace: MakeTrace, cluster: str) -> None:
    """Method paper looks at this layer's combine alone; contenders in tokens and layers, both exchanges."""
    where = Cluster.parse(cluster)
    trace = make_trace(samples=64, tokens=6, layers=1)
    plan = solved(trace, cluster, method="paper", fit_fraction=1.0).plan
    assert plan.evaluation is not None
    part = plan.evaluation.fit
    ours, still = (one.metrics for one in part.contenders if one.label in ("plan/migrating", "contiguous/standard"))
    tokens = part.num_tokens / part.num_steps

    def link_cost(metrics: Any) -> float:
        far = metrics["inter_bytes"].value / 128 if where.num_nodes > 1 else 0.0
        return float(metrics["device_copies"].value * tokens + (inter_ratio(where) - 1) * far)

    dispatched = link_cost(still) / 2  # of the only layer, from where samples start
    assert plan.outcome["sample_policy"].objective.value == pytest.approx(link_cost(ours) - dispatched, rel=1e-12)


@pytest.mark.parametrize("cluster", ["1x2", "1x4"])
def test_the_hops_that_a_fit_keeps_are_those_the_evaluator_counts(make_trace: MakeTrace, cluster: str) -> None:
    request = Request(strategy="exflow", trace=make_trace(samples=40).path, cluster=Cluster.parse(cluster))
    plan = make(request).plan
    assert plan.evaluation is not None
    kept = plan.evaluation.fit.contenders[0].metrics["hops_kept"].value
    assert plan.outcome["placement"].objective.value == pytest.approx(kept, rel=1e-12)


def test_whole_steps_are_told_with_their_samples_and_other_units_alone(make_trace: MakeTrace) -> None:
    told = {}
    for columns in (("sample", "step"), ("sample",)):
        plan = solved(make_trace(samples=64, tokens=4, columns=columns)).plan
        screen = Console(file=io.StringIO(), width=200)
        solve_report(plan, Path("plan.json"), screen)
        assert plan.evaluation is not None
        told[columns[-1]] = (plan.evaluation.fit, screen.file.getvalue())  # type: ignore[attr-defined]
    fit, screen_text = told["step"]
    assert fit.num_samples > fit.num_steps
    assert f"steps: fit {fit.num_steps} of {fit.num_samples} samples, held out" in screen_text
    fit, screen_text = told["sample"]
    assert f"samples: fit {fit.num_samples}, held out" in screen_text
