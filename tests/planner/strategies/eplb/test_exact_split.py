"""Plans for steps that are split exactly: judged on steps not seen, beside even shares, and certified."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeplan.errors import UsageError
from moeplan.planner.certify import certify
from moeplan.planner.strategies.placement_options import PlacementOptions
from moeplan.planner.strategies.registry import strategy
from tests.builders import known, model
from tests.oracles.splits import split_ratios
from tests.planner.makers import assert_refused, balances, edited, held_out, judged, planned, said, stored, tallied


def exact(plan: Any, loads: Any) -> Any:
    return split_ratios(np.stack([plan.placement.holds(n) for n in range(loads.shape[1])]), loads)


@pytest.mark.parametrize("rule", ["lp", "quota"])
def test_the_balance_of_a_plan_is_that_of_exact_splits_of_steps_it_has_not_seen(tmp_path: Path, rule: str) -> None:
    trace, loads = tallied(tmp_path / "t")
    plan = planned(trace, "eplb", redundant=4, replica_rule=rule)
    figures = {name: of["balance"] for name, of in judged(plan).items()}
    unseen = held_out(loads)
    assert plan.placement.replica_rule == rule
    assert figures["plan/standard"] == pytest.approx(exact(plan, unseen).mean(), rel=1e-12)
    assert figures["plan, even/standard"] == pytest.approx(balances(plan, unseen).mean(), rel=1e-12)
    assert figures["plan/standard"] <= figures[f"eplb, {rule}/standard"] < figures["eplb/standard"]
    assert figures["plan/standard"] < figures["plan, even/standard"]
    assert "plan, even" in said(plan)
    checks = certify(plan, trace.path).checks
    assert {"objective", "metrics of every contender"} <= {*checks}
    place = "evaluation.held_out.contenders.0.metrics.balance.value"
    assert_refused(edited(plan, place, lambda value: value * 0.999), trace.path)


def test_a_plan_of_tokens_is_certified_by_splits_that_are_proved(make_trace: Any) -> None:
    trace = make_trace(samples=24)
    plan = planned(trace, "eplb", redundant=4, replica_rule="quota")
    assert "metrics of every contender" in certify(plan, trace.path).checks
    sent = {name: of["device_copies"] for name, of in judged(plan).items()}
    assert sent["plan/standard"] < sent["plan, even/standard"]


def test_replicas_are_weighed_for_exact_splits(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t", steps=16, layers=1)
    rows = {
        rule: known(
            PlacementOptions.of(planned(trace, "eplb", redundant="auto", replica_rule=rule)).redundancy
        ).candidates
        for rule in ("even", "lp")
    }
    assert rows["lp"][0].balance == pytest.approx(rows["even"][0].balance)  # without replicas
    assert all(ours.balance < theirs.balance for ours, theirs in zip(rows["lp"][1:], rows["even"][1:], strict=True))


def test_what_does_not_go_with_exact_splits_is_refused(tmp_path: Path, make_trace: Any) -> None:
    trace, _ = tallied(tmp_path / "t")
    with pytest.raises(UsageError, match="--quantile with --replica-rule lp"):
        planned(trace, "eplb", redundant=4, replica_rule="lp", quantile=0.9)
    tokens, base = make_trace(samples=40), tmp_path / "plan.json"
    planned(tokens, "eplb", redundant=4, replica_rule="lp", to=base)
    with pytest.raises(UsageError, match="rule lp"):
        planned(tokens, "netmoe", on=base)


def test_on_a_real_training_run_a_plan_for_exact_splits_is_far_more_even(real_data: Path, tmp_path: Path) -> None:
    path = real_data / "smartmoe-gpt-moe-training" / "counts.npz"
    if not path.is_file():
        pytest.skip(f"real counts absent: {path}")
    with np.load(path) as arrays:
        loads = arrays["counts"][:, :, ::4].astype(np.int64).sum(axis=(1, 3))  # of ranks and micro-batches
    trace = stored(tmp_path / "t", loads)
    plan = planned(trace, "eplb", cluster="2x8", redundant=16, replica_rule="lp", method="refined")
    figures = judged(plan)
    ours, published = figures["plan/standard"], figures["eplb, lp/standard"]
    assert ours["balance"] < 1.2 < published["balance"]
    assert ours["balance_p95"] < 1.45 < published["balance_p95"]
    unseen = held_out(loads)[::25]
    assert exact(plan, unseen).mean() < 1.2


@pytest.mark.parametrize(
    ("name", "engine", "tried"),
    [("DeepSeek-V3", "sglang", True), ("Qwen3", "sglang", False), ("DeepSeek-V3", None, False)],
)
def test_auto_tries_it_for_an_engine_that_carries_it_out(name: str, engine: str | None, tried: bool) -> None:
    cluster = SimpleNamespace(num_devices=4, num_nodes=1, devices_per_node=4)
    task: Any = SimpleNamespace(
        model=model(experts=16, name=name),
        request=SimpleNamespace(cluster=cluster),
        source=None,
        alive=range(4),
    )
    variants: Any = strategy("eplb").variants(task, engine)
    assert ("lp" in [one.replica_rule for one in variants]) == tried
