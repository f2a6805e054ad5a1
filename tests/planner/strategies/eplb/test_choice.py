"""The default of eplb: chosen on parts of the fitted units, and on others never worse than EPLB as published."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.cases.eplb_choice import LARGE, SMALL, decoding, outcomes, recorded
from moeplan.planner.certify import certify
from moeplan.planner.strategies.eplb import EplbParams
from moeplan.planner.strategies.eplb import choice as choosing
from moeplan.planner.strategies.eplb.options import Choice, Trial
from moeplan.planner.strategies.placement_options import PlacementOptions
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import eplb
from moeplan.solvers.balance import step_balance
from tests.planner.makers import assert_refused, edited, fit_part, planned, said, stored, tallied

CHOICE = "options.placement.choice"


def chosen(plan: Any) -> Choice:
    """The choice that a plan records."""
    choice = PlacementOptions.of(plan).choice
    assert choice is not None
    return choice


def topical(folder: Path, spread: float, steps: int = 40, keys: tuple[str, ...] = ("step",)) -> Any:
    """A trace of steps on one of two topics, that make experts busy by so much, and its loads."""
    rng = np.random.default_rng(1)
    usual, topics = rng.lognormal(0, 1, (8, 32)), rng.lognormal(0, spread, (2, 8, 32))
    shares = usual * topics[np.arange(steps) % 2]
    loads = np.array([[rng.multinomial(600, one / one.sum()) for one in step] for step in shares])
    loads = loads[rng.permutation(steps)]
    return stored(folder, loads, keys), loads


@pytest.mark.parametrize(("drift", "pairs", "gains"), [(0.0, SMALL, False), (0.3, LARGE, True)])
def test_on_steps_like_those_of_decoding_the_default_is_never_worse_on_average(
    drift: float, pairs: int, gains: bool
) -> None:
    runs = list(outcomes(decoding("log-normal", 1.0, drift, pairs, 16, "1x16", layers=8, seeds=2)))
    ours, published = sum(run.default for run in runs), sum(run.published for run in runs)
    assert ours <= published
    assert gains == (ours < published)  # steps that differ by noise alone show none


def test_on_recorded_counts_the_default_is_never_worse_and_on_training_far_better(real_data: Path) -> None:
    for scenario in recorded(real_data, seeds=1):
        (run,) = outcomes(scenario)
        assert run.default <= run.published, scenario.name
        assert not scenario.name.startswith("SmartMoE") or run.default < 0.95 * run.published


def test_between_equals_about_one_choice_in_a_hundred_leaves_published_eplb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains of layers are 0 in the mean, and parts of a layer much alike: that they are no further layers matters."""
    parts, layers, choices = 4, 12, 4000
    rng = np.random.default_rng(3)

    def judged(by: str, *_: Any) -> Any:
        balance_PL = np.full((parts, layers), 1.5)
        if by == "published":
            return balance_PL
        balance_PL += rng.normal(0, 0.1, layers) + rng.normal(0, 0.02, (parts, layers))
        if by != "sum":  # tried on some layers a part
            balance_PL[np.arange(layers) % parts != np.arange(parts)[:, None]] = np.nan
        return balance_PL

    monkeypatch.setattr(choosing, "_judged", judged)
    monkeypatch.setattr(choosing, "_num_parts", lambda _: parts)
    task: Any = SimpleNamespace(request=SimpleNamespace(mixture=()), say=lambda _: None)
    left = sum(choosing.choose(task, np.array([3])).chosen != "published" for _ in range(choices))
    assert abs(left / choices - choosing.WRONG) < 3 * (choosing.WRONG / choices) ** 0.5


def test_on_even_routing_in_single_slots_where_all_placements_are_alike_published_eplb_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moeplan.solvers.eplb.steps.WORK", 50_000)
    left = 0
    for seed in range(40):
        loads = np.random.default_rng(seed).multinomial(200, np.full(16, 1 / 16), size=(12, 8))
        parts = [loads[first::4] for first in range(4)]
        member = SimpleNamespace(steps=[loads, *parts], in_parts=SimpleNamespace(cohorts=parts))
        task: Any = SimpleNamespace(
            members=[(1.0, member)],
            model=SimpleNamespace(num_layers=8, num_expert_groups=None),
            request=SimpleNamespace(cluster=Cluster(1, 4), mixture=()),
            params=EplbParams(),
            say=lambda _: None,
            workers=None,
        )
        left += choosing.choose(task, np.full(4, 4)).chosen != "published"
    assert left <= 3  # 0.4 are expected; four or more would be by chance in one of 1,000 such tests


@pytest.mark.parametrize("keys", [("step",), ("sample",)])
def test_steps_that_differ_are_placed_one_by_one_and_the_screen_says_by_what(tmp_path: Path, keys: Any) -> None:
    trace, _ = topical(tmp_path / "t", 1.0, steps=160, keys=keys)
    plan = planned(trace, "eplb", redundant=16, samples_per_step=4 if keys == ("sample",) else None)
    choice = chosen(plan)
    assert choice.chosen in ("steps", "robust")
    assert plan.outcome["placement"].objective.name == "step_balance"
    best = next(one for one in choice.candidates if one.by == choice.chosen)
    assert f"{best.balance:.4f} against {best.published:.4f} of EPLB as published" in said(plan)
    certify(plan, trace.path)


def test_figures_of_a_candidate_are_of_every_part_as_placed_by_the_others(tmp_path: Path) -> None:
    trace, loads = topical(tmp_path / "t", 0.5)
    plan = planned(trace, "eplb", redundant=16)
    fit_BLE = fit_part(loads)
    place = np.random.default_rng(0).permutation(len(fit_BLE))
    figures = []
    for first in range(4):
        unseen = np.isin(np.arange(len(fit_BLE)), place[first::4])
        load_LE, left_BLE = fit_BLE[~unseen].sum(axis=0), fit_BLE[unseen].astype(float)
        placed = (eplb.solve(load_LE, plan.cluster, slots=12, method=how) for how in ("refined", "published"))
        figures.append([step_balance(left_BLE, one.placement) for one in placed])
    by_sum = chosen(plan).candidates[0]
    assert (by_sum.balance, by_sum.published) == pytest.approx(np.mean(figures, axis=0), rel=1e-12)


def test_published_is_left_only_for_what_is_surely_more_even() -> None:
    def one(by: Any, gain: float, low: float) -> Trial:
        return Trial(by=by, balance=2 - gain, published=2.0, low=low)

    assert Choice(candidates=(one("sum", 0.5, -0.01), one("steps", 0.1, 0.0))).chosen == "published"
    assert Choice(candidates=(one("sum", 0.5, 0.01), one("robust", 0.1, 0.05))).chosen == "robust"
    assert Choice(reason="one").chosen == "published"


@pytest.mark.parametrize("steps", [1, 2])
def test_where_one_unit_is_fitted_nothing_can_be_shown_and_published_eplb_stands(tmp_path: Path, steps: int) -> None:
    trace, loads = tallied(tmp_path / "t", steps=steps)
    plan = planned(trace, "eplb", redundant="auto", fit_fraction=1.0)
    assert (not chosen(plan).candidates, bool(chosen(plan).reason)) == ((True, True) if steps == 1 else (False, False))
    if steps == 1:
        slots = plan.placement.slots
        expected = eplb.solve(loads[0], plan.cluster, slots=slots, method="published").placement
        np.testing.assert_array_equal(plan.placement.physical_to_logical, expected.physical_to_logical)
        assert "one unit was fitted" in said(plan)
    certify(plan, trace.path)


def test_a_choice_that_does_not_add_up_is_refused(tmp_path: Path) -> None:
    trace, _ = topical(tmp_path / "t", 1.0)
    plan = planned(trace, "eplb", redundant=16)
    certify(plan, trace.path)
    for path, change in (
        (CHOICE, None),
        ("options.placement.method", "refined"),
        (f"{CHOICE}.candidates", []),
        (f"{CHOICE}.candidates", lambda tried: tried[:1]),
        (f"{CHOICE}.candidates.0.low", 3.0),
        (f"{CHOICE}.candidates", lambda tried: [one | {"low": -1.0} for one in tried]),  # published, then
        (f"{CHOICE}.reason", "none"),
    ):
        assert_refused(edited(plan, path, change))
    even = planned(topical(tmp_path / "u", 0.0)[0], "eplb", "1x4", redundant=4)
    if chosen(even).chosen == "published":
        rows = even.model_dump(mode="json")["decisions"]["placement"]["physical_to_logical"]
        other = edited(even, "decisions.placement.physical_to_logical", [rows[1], rows[0], *rows[2:]])
        assert_refused(other, tmp_path / "u")
