import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from moeplan.errors import UsageError
from moeplan.planner.learning_curve import LearningCurve, Point, as_dict, curve_report, learning_curve, write_curve
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.runtime.plan import Metric
from moeplan.workers import opened
from tests.planner.makers import judged, pictures_in, request, screen

CURVE = "moeplan.planner.learning_curve"


def for_sweeps(trace: Any, **settings: Any) -> Request:
    usual: dict[str, Any] = {"cluster": "1x2", "method": "sweeps", "time_limit_s": 1e5}
    return request(trace, **{name: one for name, one in (usual | settings).items() if one is not None})


def curve_of(trace: Any, **settings: Any) -> LearningCurve:
    return learning_curve(for_sweeps(trace, **settings))


@pytest.fixture(scope="module", autouse=True)
def little_work_each() -> Iterator[None]:
    """Solves that end soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{CURVE}.WORK", 2e8)
        yield


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    return make_trace(samples=48, tokens=6, top_k=1)


@pytest.fixture(scope="module")
def curve(trace: Any) -> LearningCurve:
    return curve_of(trace)


def test_sizes_double_up_to_all_fitted_samples_and_the_last_gain_is_the_plans(trace: Any, curve: LearningCurve) -> None:
    plan: Any = solve(for_sweeps(trace))
    copies = {label: metrics["device_copies"] for label, metrics in judged(plan).items()}
    units = [one.num_units for one in curve.points]
    assert units[-1] == plan.evaluation.fit.num_samples
    assert all(a == b // 2 for a, b in itertools.pairwise(units))
    assert [one.num_tokens for one in curve.points] == [6 * units for units in units]
    assert [one.num_subsets for one in curve.points] == [3] * (len(units) - 1) + [1]
    assert curve.points[-1].gain.value == copies["contiguous/coherent"] - copies["plan/coherent"]
    assert curve.num_capped == 0


def test_the_curve_is_the_same_where_processes_solve(trace: Any, curve: LearningCurve) -> None:
    with opened("2") as workers:
        assert learning_curve(for_sweeps(trace), workers=workers) == curve


def test_more_tokens_gain_more_on_samples_that_were_not_seen(curve: LearningCurve) -> None:
    first, *_, half, last = (point.gain.value for point in curve.points)
    assert first < 0.8 * last
    assert curve.last_doubling.value == pytest.approx(last - half)


def test_on_a_single_held_out_sample_no_gain_has_an_interval(make_trace: Any) -> None:
    curve = curve_of(make_trace(samples=6, tokens=30), fit_fraction=0.75, seed=1)
    gains = [*(point.gain for point in curve.points), curve.last_doubling]
    assert {(gain.low, gain.high) for gain in gains} == {(None, None)}


def points(*gains: float) -> LearningCurve:
    made = [Point(2**i, 10 * 2**i, 3, Metric(value=gain, low=gain - 1, high=gain + 1)) for i, gain in enumerate(gains)]
    step = gains[-1] - gains[-2]
    last = Metric(value=step, low=step - 1, high=step + 1)
    return LearningCurve("sample", "coherent", "device_copies", tuple(made), last, num_solves=9, num_capped=0, wall_s=4)


def test_enough_is_where_the_curve_stays_above_the_share_and_more_helps_while_it_still_climbs() -> None:
    flat, steep, first = points(96.0, 50.0, 97.0, 99.0, 100.0), points(10.0, 50.0, 100.0), points(99.0, 100.0)
    capped = dataclasses.replace(first, num_capped=3, metric="node_copies")
    assert [(curve.enough(0.95).num_units, curve.saturated) for curve in (flat, steep)] == [(4, True), (4, False)]
    for curve, words in (
        (first, ("already from the fewest tried on, 10 tokens, 1 sample; perhaps from fewer",)),
        (capped, ("9 solves in 4 s, 3 ended by time: another run may differ", "copies to other nodes")),
        (flat, ("95 % of the last gain from 40 tokens on", "9 solves in 4 s", "more tokens would hardly help")),
        (steep, ("95 % of the last gain from all 40 tokens only", "record more")),
        (points(0.0, -1.0), ("no number of tokens is enough",)),
    ):
        assert all(what in screen(curve_report, curve) for what in words)


def test_a_bar_that_ends_at_0_is_drawn_to_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[Any]()
    monkeypatch.setattr(f"{CURVE}.write_page", lambda *given: drawn.extend(given[-1]))
    curve = points(-1.0, 5.0)
    unbounded = dataclasses.replace(curve.points[1], gain=Metric(value=5.0))
    write_curve(dataclasses.replace(curve, points=(curve.points[0], unbounded)), tmp_path / "curve.html")
    (picture,) = pictures_in(drawn[-1])
    dots = picture.lines[-1]
    assert ([*dots.low], [*dots.high]) == ([-2.0, 5.0], [0.0, 5.0])


@pytest.mark.parametrize("changes", [{}, {"cluster": "2x2", "dispatch_model": "standard", "method": "annealing"}])
def test_solves_end_by_work_so_that_a_seed_draws_its_curve_again(trace: Any, changes: dict[str, Any]) -> None:
    first, again, other = (curve_of(trace, seed=seed, **changes) for seed in (0, 0, 1))
    assert (first.num_capped, first.metric) == (0, "node_copies" if changes else "device_copies")
    assert first == again != other


def test_its_json_form_and_its_page(curve: LearningCurve, tmp_path: Path) -> None:
    document = as_dict(curve)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    write_curve(curve, tmp_path / "curve.html")
    assert f"{curve.points[-1].num_tokens}" in (tmp_path / "curve.html").read_text()


def test_a_curve_needs_exflow_and_samples_to_halve_and_to_hold_out(trace: Any, make_trace: Any) -> None:
    for changes, words in (
        (
            {"strategy": "eplb", "method": None, "time_limit_s": None},
            "--learning-curve with --from or another strategy",
        ),
        ({"fit_fraction": 1.0}, "--learning-curve with --fit-fraction 1"),
        ({"method": "exact"}, "--method exact"),
        ({"dispatch_model": "migrating"}, "--dispatch"),
    ):
        with pytest.raises(UsageError, match=words):
            curve_of(trace, **changes)
    with pytest.raises(UsageError, match="record more"):
        curve_of(make_trace(samples=2), seed=1)


def test_ctrl_c_in_a_solve_ends_the_curve(trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver itself keeps its best and says so; a curve of cut solves would be none."""
    improve = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("moeplan.solvers.exflow.methods.Run._improve", improve)
    with pytest.raises(KeyboardInterrupt):
        curve_of(trace)
    assert improve.call_count == 1
