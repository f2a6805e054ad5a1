"""EPLB on counts, which is what engines record: fitted on some steps, judged on the others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import CertificationError, InputError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.options import PlacementOptions
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Plan
from moeplan.traces.count_form import tabulate, write_counts
from moeplan.traces.split import fitted
from tests.planner.edits import edited
from tests.planner.makers import balances, held_out, stored, tallied

SIZES: dict[str, Any] = {"hidden_size": 64, "ffn_size": 96, "dtype_bytes": 2}


def planned(trace: Any, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"strategy": "eplb", "cluster": Cluster.parse("2x2"), "redundant": 4}
    return solve(Request.of(trace=str(trace.path), **settings | changes))


def judged(plan: Plan, label: str = "plan/standard") -> dict[str, float]:
    assert plan.evaluation is not None
    part = plan.evaluation.judging
    return {name: one.value for c in part.contenders if c.label == label for name, one in c.metrics.items()}


def test_the_balance_of_a_plan_is_that_of_the_steps_it_has_not_seen(tmp_path: Path) -> None:
    trace, counts = tallied(tmp_path / "t")
    plan = planned(trace)
    found = balances(plan, held_out(counts))
    assert judged(plan)["balance"] == pytest.approx(found.mean(), rel=1e-12)
    assert judged(plan)["balance_p95"] == pytest.approx(np.quantile(found, 0.95), rel=1e-12)
    assert judged(plan).keys() == {"balance", "balance_p95"}
    assert plan.evaluation is not None
    assert plan.evaluation.fit.num_steps == fitted(np.arange(40), seed=0, fraction=0.5).sum()
    assert plan.evaluation.fit.num_tokens == 256 * plan.evaluation.fit.num_steps
    assert [one.label for one in plan.evaluation.fit.contenders] == [
        "plan/standard",
        "contiguous/standard",
        "contiguous in 20 slots/standard",
        "eplb/standard",
    ]
    assert plan.verdict is not None
    assert (plan.verdict.metric, plan.verdict.value) == ("balance", "benefit")


def test_samples_of_counts_run_so_many_a_step_and_the_last_ones_fill_none(tmp_path: Path) -> None:
    trace, counts = tallied(tmp_path / "t", keys=("sample",), steps=50)
    plan = planned(trace, samples_per_step=4)
    unseen = held_out(counts, ids=3 * np.arange(50))
    whole = len(unseen) // 4
    found = balances(plan, unseen[: 4 * whole].reshape(whole, 4, *unseen.shape[1:]).sum(axis=1))
    assert judged(plan)["balance"] == pytest.approx(found.mean(), rel=1e-12)
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    assert plan.evaluation.held_out.dropped_samples == len(unseen) - 4 * whole


@pytest.mark.parametrize(("spread", "objective"), [(0.0, "balance"), (1.0, "step_balance")])
def test_steps_that_differ_by_chance_alone_are_placed_by_their_sum(
    tmp_path: Path, spread: float, objective: str
) -> None:
    rng = np.random.default_rng(1)
    usual, topics = rng.lognormal(0, 1, (3, 32)), rng.lognormal(0, spread, (2, 3, 32))
    shares = usual * topics[np.arange(40) % 2]
    counts = np.array([[rng.multinomial(600, one / one.sum()) for one in step] for step in shares])
    trace = stored(tmp_path / "t", counts[rng.permutation(40)])
    plan = planned(trace, redundant=16)
    assert plan.outcome["placement"].objective.name == objective
    certify(plan, trace.path)


@pytest.mark.parametrize("keys", [("step",), ("sample",), ("step", "sample"), ()], ids=str)
@pytest.mark.parametrize(
    "changes", [{}, {"method": "published"}, {"cluster": Cluster.parse("1x4"), "dead": (2,), "redundant": 2}]
)
def test_every_figure_is_recomputed(tmp_path: Path, keys: tuple[str, ...], changes: Any) -> None:
    trace, _ = tallied(tmp_path / "t", keys=keys)
    plan = planned(trace, fit_fraction=0.5 if keys else 1.0, **changes)
    certificate = certify(plan, trace.path)
    assert certificate.largest_difference < 1e-12
    assert {"metrics of every contender", "verdict", "objective"} <= {*certificate.checks}


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("evaluation.held_out.contenders.0.metrics.balance.value", lambda x: x - 1e-6),
        ("evaluation.held_out.contenders.0.metrics.balance.low", lambda x: x - 1e-6),
        ("evaluation.held_out.contenders.2.metrics.balance_p95.value", lambda x: x + 1e-6),
        ("evaluation.fit.num_tokens", lambda x: x + 1),
        ("evaluation.held_out.num_steps", lambda x: x + 1),
        ("inputs.trace.num_tokens", lambda x: x + 1),
        ("options.evaluation.unit", "sample"),
        ("options.evaluation.home", "ordinal"),
        ("options.evaluation.step", "derived"),
        ("options.placement.quantile", 0.5),
        ("options.placement.method", "published"),
        ("options.placement.dead", [1]),
        ("options.placement.pins", [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]),
        ("options.placement.groups", "whole"),
        ("outcome.placement.objective.value", lambda x: x - 1e-6),
        ("verdict.gain.low", lambda x: x - 1e-6),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_figure_that_the_counts_do_not_give_is_refused(tmp_path: Path, path: str, change: Any) -> None:
    trace, _ = tallied(tmp_path / "t")
    plan = planned(trace)
    certify(plan, trace.path)
    with pytest.raises(CertificationError):
        certify(edited(plan, path, change), trace.path)


@pytest.mark.parametrize("quantile", [None, 0.9, 1.0])
def test_recorded_steps_are_balanced_one_by_one_and_the_plan_says_how(tmp_path: Path, quantile: float | None) -> None:
    trace, counts = tallied(tmp_path / "t")
    plan = planned(trace, quantile=quantile)
    seen = counts[fitted(np.arange(len(counts)), seed=0, fraction=0.5)]
    found, outcome = balances(plan, seen), plan.outcome["placement"]
    expected = found.mean()
    if quantile is not None:
        expected = np.quantile(found, quantile, axis=0, method="higher").mean()
    name = {None: "step_balance", 0.9: "step_balance_p90", 1.0: "step_balance_p100"}[quantile]
    assert outcome.objective.name == name
    assert outcome.objective.value == pytest.approx(expected, rel=1e-12)
    assert "objective" in certify(plan, trace.path).checks
    with pytest.raises(CertificationError):
        certify(edited(plan, "outcome.placement.objective.name", "step_balance_p50"), trace.path)
    with pytest.raises(CertificationError):
        certify(edited(plan, "outcome.placement.objective.value", lambda x: x * 0.999), trace.path)


def test_counts_as_large_as_a_trace_may_hold_are_certified(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(2**39, 2**40, (12, 3, 8))
    trace = stored(tmp_path / "trace", counts)
    plan = solve(Request.of(strategy="eplb", trace=trace.path, cluster=Cluster.parse("1x4")))
    assert certify(plan, trace.path).largest_difference < 1e-9


def test_a_quantile_is_of_recorded_steps_alone(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t", keys=("sample",))
    with pytest.raises(UsageError, match=r"--quantile of steps, and .* has none recorded"):
        planned(trace, quantile=0.9)


def test_tokens_with_recorded_steps_are_balanced_by_step_too(make_trace: Any) -> None:
    trace = make_trace(samples=60, tokens=20, columns=("sample", "step"))
    plan = solve(Request.of(strategy="eplb", trace=str(trace.path), cluster=Cluster.parse("1x4"), redundant=4))
    assert plan.outcome["placement"].objective.name == "step_balance"
    certificate = certify(plan, trace.path)
    assert "objective" in certificate.checks
    assert certificate.largest_difference < 1e-12


def test_a_profile_times_the_experts_and_says_why_nothing_else(tmp_path: Path, make_profile: Any) -> None:
    trace, _ = tallied(tmp_path / "t", **SIZES)
    profile = make_profile("2x2")
    plan = planned(trace, profile=profile)
    assert {name for name in judged(plan) if name.endswith("_s")} == {"experts_s"}
    assert plan.options["seconds"]["missing"].keys() == {"dispatch", "kv", "attention"}
    assert plan.verdict is not None
    assert plan.verdict.metric == "balance"
    assert "predicted seconds" in certify(plan, trace.path, profile).checks
    with pytest.raises(CertificationError):
        certify(edited(plan, "options.seconds.missing.dispatch", "who knows"), trace.path, profile)


@pytest.mark.parametrize("strategy", ["exflow", "contiguous", "pipemoe"])
def test_what_needs_tokens_refuses_counts_by_its_name(tmp_path: Path, make_profile: Any, strategy: str) -> None:
    trace, _ = tallied(tmp_path / "t", **SIZES)
    with pytest.raises(InputError, match=f"counts alone; {strategy} needs tokens"):
        solve(Request.of(strategy=strategy, trace=str(trace.path), cluster=Cluster(2, 2), profile=make_profile("2x2")))


def test_counts_have_no_phases_and_one_block_is_not_split(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t", keys=())
    with pytest.raises(UsageError, match="no known phase"):
        planned(trace, phases=("decode",))
    with pytest.raises(InputError, match="1 blocks split into"):
        planned(trace)
    assert planned(trace, fit_fraction=1.0).evaluation is not None


def test_the_counts_of_a_trace_give_the_loads_that_its_tokens_give(make_trace: Any, tmp_path: Path) -> None:
    tokens = make_trace(samples=60, columns=("sample",), unrouted=0.1)
    meta = tokens.meta.model_copy(update={"form": "counts"})
    write_counts(tmp_path / "counts", meta, tabulate(tokens))
    both = [
        solve(
            Request.of(strategy="eplb", trace=str(path), cluster=Cluster.parse("1x4"), method="published", redundant=0)
        )
        for path in (tokens.path, tmp_path / "counts")
    ]
    assert both[0].decisions == both[1].decisions
    assert judged(both[1])["balance"] == pytest.approx(judged(both[0])["balance"], rel=1e-12)


def test_on_a_real_training_run_balancing_step_by_step_pays_on_steps_it_has_not_seen(
    real_data: Path, tmp_path: Path
) -> None:
    path = real_data / "smartmoe-gpt-moe-training" / "counts.npz"
    if not path.is_file():
        pytest.skip(f"real counts absent: {path}")
    with np.load(path) as arrays:
        counts = arrays["counts"].astype(np.int64).sum(axis=(1, 3))  # of ranks and micro-batches
    trace = stored(tmp_path / "t", counts)
    plan = planned(trace, cluster=Cluster.parse("2x8"), redundant=16)
    found = {label: judged(plan, f"{label}/standard")["balance"] for label in ("plan", "eplb", "contiguous")}
    assert found["plan"] < 0.9 * found["eplb"] < 0.3 * found["contiguous"]


def test_figures_that_earlier_plans_hold_are_read_over_and_told(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t")
    plan = edited(planned(trace), "options.placement.raw", {"balance": 1.1})
    assert "EPLB unrepaired, and plans of a phase judged on another" in certify(plan, trace.path).unchecked
    assert "raw" not in PlacementOptions.of(edited(plan, "options.placement.swaps", [])).model_dump()
