"""EPLB on counts, which is what engines record: fitted on some steps, judged on others; what it is asked to keep."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import InputError, UsageError
from moeplan.planner.certify import certify
from tests.planner import makers
from tests.planner.makers import (
    assert_refused,
    balances,
    edited,
    fit_part,
    held_out,
    judged,
    planned,
    said,
    stored,
    tallied,
)

SIZES: dict[str, Any] = {"hidden_size": 64, "ffn_size": 96, "dtype_bytes": 2}
OURS = "plan/standard"
KEPT = "dead devices, pins and whole groups"


def on_counts(trace: Any, **settings: Any) -> Any:
    return planned(trace, "eplb", **{"redundant": 4} | settings)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trace of steps, and its loads."""
    return tallied(tmp_path_factory.mktemp("steps") / "t")


def test_the_balance_of_a_plan_is_that_of_the_steps_it_has_not_seen(steps: Any) -> None:
    trace, loads = steps
    plan = on_counts(trace)
    expected = balances(plan, held_out(loads))
    figures = {"balance": expected.mean(), "balance_p95": np.quantile(expected, 0.95)}
    assert judged(plan)[OURS] == pytest.approx(figures, rel=1e-12)
    fit, rivals = plan.evaluation.fit, ("contiguous", "contiguous in 20 slots", "eplb")
    assert (fit.num_steps, fit.num_tokens) == (len(fit_part(loads)), 256 * len(fit_part(loads)))
    assert [one.label for one in fit.contenders] == [OURS, *(f"{name}/standard" for name in rivals)]
    assert (plan.verdict.metric, plan.verdict.value) == ("balance", "benefit")


@pytest.mark.parametrize("strategy", ["eplb", "exflow"])
def test_a_single_unit_is_fitted_and_judged_on_itself_and_the_screen_says_so(
    tmp_path: Path, make_trace: Any, strategy: str
) -> None:
    one = make_trace(samples=1) if strategy == "exflow" else tallied(tmp_path / "t", steps=1)[0]
    plan = planned(one, strategy)
    assert (plan.inputs.trace.split.fit_fraction, plan.evaluation.held_out) == (1.0, None)
    what, same = ("one sample", "tokens") if strategy == "exflow" else ("one snapshot of counts", "counts")
    assert f"{what}: fitted and judged on the same {same}; to know how it holds record a second one: " in said(plan)
    certify(plan, one.path)
    with pytest.raises(InputError, match="give --fit-fraction 1"):
        planned(one, strategy, fit_fraction=0.5)


@pytest.mark.parametrize(("spread", "objective"), [(0.0, "balance"), (1.0, "step_balance")])
def test_steps_that_differ_by_chance_are_not_placed_one_by_one(tmp_path: Path, spread: float, objective: str) -> None:
    rng = np.random.default_rng(1)
    usual, topics = rng.lognormal(0, 1, (8, 32)), rng.lognormal(0, spread, (2, 8, 32))
    shares = usual * topics[np.arange(40) % 2]
    loads = np.array([[rng.multinomial(600, one / one.sum()) for one in step] for step in shares])
    trace = stored(tmp_path / "t", loads[rng.permutation(40)])
    plan = on_counts(trace, redundant=16)
    assert plan.outcome["placement"].objective.name == objective
    certify(plan, trace.path)


@pytest.mark.parametrize("keys", [("step",), ("sample",), ("step", "sample"), ()], ids=str)
@pytest.mark.parametrize("changes", [{}, {"method": "published"}, {"cluster": "1x4", "dead": (2,), "redundant": 2}])
def test_every_figure_is_recomputed(tmp_path: Path, keys: tuple[str, ...], changes: Any) -> None:
    trace, _ = tallied(tmp_path / "t", keys=keys)
    certificate = certify(on_counts(trace, fit_fraction=0.5 if keys else 1.0, **changes), trace.path)
    assert certificate.largest_difference < 1e-12
    assert {"metrics of every contender", "verdict", "objective"} <= {*certificate.checks}


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("options.evaluation.unit", "sample"),
        ("options.evaluation.home", "ordinal"),
        ("options.evaluation.step", "derived"),
        ("options.placement.quantile", 0.5),
        ("options.placement.method", "published"),
        ("options.placement.dead", [1]),
        ("options.placement.pins", [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]),
        ("options.placement.groups", "whole"),
    ],
)
def test_a_figure_that_the_counts_do_not_give_is_refused(steps: Any, path: str, change: Any) -> None:
    assert_refused(edited(on_counts(steps[0]), path, change), steps[0].path)


@pytest.mark.parametrize(("quantile", "name"), [(None, "step_balance"), (0.9, "step_balance_p90")])
def test_recorded_steps_are_balanced_one_by_one_and_the_plan_says_how(steps: Any, quantile: Any, name: str) -> None:
    trace, loads = steps
    plan = on_counts(trace, method="refined", quantile=quantile)
    ratios, objective = balances(plan, fit_part(loads)), plan.outcome["placement"].objective
    expected = ratios if quantile is None else np.quantile(ratios, quantile, axis=0, method="higher")
    assert (objective.name, objective.value) == (name, pytest.approx(expected.mean(), rel=1e-12))
    assert_refused(edited(plan, "outcome.placement.objective.name", "step_balance_p50"), trace.path)


def test_a_profile_times_the_experts_and_says_why_nothing_else(tmp_path: Path, make_profile: Any) -> None:
    trace, _ = tallied(tmp_path / "t", **SIZES)
    profile = make_profile("2x2")
    plan = on_counts(trace, profile=profile)
    assert {name for name in judged(plan)[OURS] if name.endswith("_s")} == {"experts_s"}
    assert plan.verdict.metric == "experts_s"
    assert "predicted seconds" in certify(plan, trace.path, profile).checks
    for strategy in ("exflow", "contiguous", "pipemoe"):
        with pytest.raises(InputError, match=f"counts alone; {strategy} needs tokens"):
            planned(trace, strategy, "2x2", profile=profile)


def test_counts_have_no_phases_and_one_block_is_not_split_in_two_and_a_quantile_is_of_recorded_steps(
    tmp_path: Path,
) -> None:
    block, samples = (tallied(tmp_path / name, keys=keys)[0] for name, keys in (("t", ()), ("u", ("sample",))))
    for trace, changes, words in (
        (block, {"phases": ("decode",)}, "no known phase"),
        (block, {"fit_fraction": 0.5}, "1 block in all; expected two or more"),
        (samples, {"quantile": 0.9}, r"--quantile of steps, and .* has none recorded"),
    ):
        with pytest.raises((InputError, UsageError), match=words):
            on_counts(trace, **changes)


def test_on_a_real_training_run_balancing_steps_pays_on_steps_it_has_not_seen(real_data: Path, tmp_path: Path) -> None:
    path = real_data / "smartmoe-gpt-moe-training" / "counts.npz"
    if not path.is_file():
        pytest.skip(f"real counts absent: {path}")
    with np.load(path) as arrays:
        loads = arrays["counts"].astype(np.int64).sum(axis=(1, 3))  # of ranks and micro-batches
    plan = on_counts(stored(tmp_path / "t", loads), cluster="2x8", redundant=16)
    ours, eplb, contiguous = (judged(plan)[f"{name}/standard"]["balance"] for name in ("plan", "eplb", "contiguous"))
    assert ours < 0.9 * eplb < 0.3 * contiguous


def test_dead_devices_hold_nothing_pins_are_held_and_both_are_certified(steps: Any) -> None:
    trace, loads = steps
    plan = on_counts(trace, dead=(1,), pins=((3, 0), (5, 3), (3, 2)), redundant=5)
    assert plan.placement.slots.tolist() == [7, 0, 7, 7]
    for layer in range(3):
        assert {3} <= {*plan.placement.held(layer, 0)} & {*plan.placement.held(layer, 2)}
        assert 5 in plan.placement.held(layer, 3)
    assert judged(plan)[OURS]["balance"] == pytest.approx(balances(plan, held_out(loads)).mean(), rel=1e-12)
    assert KEPT in certify(plan, trace.path).checks
    for key, change in (("dead", [1, 2]), ("pins", [[expert, 3] for expert in (3, 4, 6, 7, 8, 9, 10, 11)])):
        assert_refused(edited(plan, f"options.placement.{key}", change))


def test_whole_groups_are_blocks_in_every_layer_and_are_certified(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t", num_expert_groups=4)
    plan = planned(trace, "eplb", groups="whole")
    for row in plan.placement.physical_to_logical // 4:
        assert [len({*row[first : first + 4].tolist()}) for first in range(0, 16, 4)] == [1] * 4
    assert KEPT in certify(plan, trace.path).checks
    swapped = plan.model_dump(mode="json")["decisions"]["placement"]["physical_to_logical"]
    first, second = swapped[0][:4], swapped[0][4:8]
    swapped[0][:8] = [*sorted([*first[:3], second[0]]), *sorted([first[3], *second[1:]])]
    in_order = [[*range(5), *range(4, 9), *range(8, 13), *range(12, 16)]] * 3  # one after another, but with replicas
    for uneven in (
        {"physical_to_logical": swapped},
        {"physical_to_logical": in_order, "slots_per_device": [5, 5, 5, 4]},
    ):
        assert_refused(edited(plan, "decisions.placement", lambda made, to=uneven: made | to), words="is split")


@pytest.mark.parametrize("strategy", ["eplb", "exflow"])
def test_eplb_keeps_expert_groups_on_a_node_as_plan_and_rival(make_trace: Any, tmp_path: Path, strategy: str) -> None:
    plain = make_trace(samples=40)
    trace = makers.sized(plain, tmp_path / "grouped", num_expert_groups=4)
    plan, other = (planned(one, strategy, redundant=4) for one in (trace, plain))
    assert plan.evaluation.fit.contenders[-1].metrics != other.evaluation.fit.contenders[-1].metrics
    certify(plan, trace.path)
    if strategy == "eplb":
        assert plan.outcome["placement"].backend == "moeplan hierarchical"
        for row in plan.placement.physical_to_logical.reshape(-1, 2, 6):
            groups = [set((node // 2).tolist()) for node in row]
            assert not groups[0] & groups[1]
            assert np.unique(row).size == 8
    with pytest.raises(UsageError, match="expert groups"):
        planned(plain, strategy, groups="whole")
