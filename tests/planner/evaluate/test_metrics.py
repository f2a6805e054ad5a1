"""Metrics by hand, and their intervals: over samples or steps, and over what a source of seconds may err; verdicts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moeplan.planner.evaluate.costs import CostModel
from moeplan.planner.evaluate.evaluate import Evaluated, verdict
from moeplan.planner.evaluate.journey import Journey
from moeplan.planner.evaluate.metrics import Figures, figures_of
from moeplan.planner.evaluate.price import Seconds, price
from moeplan.planner.evaluate.scene import Scene
from moeplan.planner.evaluate.sums import DRAWS, Context, difference, interval, resampled_sums
from moeplan.planner.evaluate.tally import COUNTS, Ports, Tally
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.fits.fit import Prediction
from moeplan.runtime.decisions import DispatchModel
from moeplan.runtime.plan import Contender as Row
from moeplan.runtime.plan import Evaluation, Part
from moeplan.solvers.placement import Placement
from moeplan.traces.model import Attention
from tests.builders import model

MODEL = model(2, 4, 1, hidden_size=10, dtype_bytes=2, attention=Attention(kv_size=5))
ONE = model(1, 2, 2, hidden_size=1, dtype_bytes=1, attention=Attention(kv_size=1))  # a copy is a byte


def figures(rows: list[dict[str, int]], loads: Any, spec: Any = MODEL, *, each: float = 4, seed: int = 0) -> Figures:
    """Those of units with these counts under coherent dispatch."""
    counts = np.array([[row.get(name, 0) for name in COUNTS] for row in rows], dtype=np.int64)
    tally = Tally(counts, np.array(loads, dtype=np.int64), np.ones(len(loads[0][0]), dtype=np.int64))
    (only,) = figures_of([Context(tally, Seconds(), "coherent", spec, each)], seed=seed)
    return only


def test_shares_copies_balance_and_bytes_by_hand() -> None:
    names = ("tokens", "hops", "hops_kept", "node_hops_kept", "device_copies", "node_copies", "far_copies")
    rows = [dict(zip(names, row, strict=True)) for row in ((4, 4, 1, 3, 6, 2, 3), (6, 6, 4, 6, 4, 0, 0))]
    values = figures(rows, [[[6, 4], [9, 1]], [[5, 5], [0, 0]]], each=5).value
    assert values["hops_kept"] == 0.5
    assert values["node_hops_kept"] == 0.9
    assert values["device_copies"] == 10 / 20
    assert values["node_copies"] == 2 / 20
    assert values["balance"] == pytest.approx((6 / 5 + 9 / 5 + 5 / 5) / 3)  # the idle layer of step 1 has no balance
    assert values["inter_bytes"] == pytest.approx(3 / 20 * 2 * 5 * 10 * 2)
    assert values["intra_bytes"] == pytest.approx(7 / 20 * 2 * 5 * 10 * 2)
    assert values["kv_bytes"] == pytest.approx(5 * 2 * 1 * 5 * 2)


def test_sizes_that_are_unknown_leave_their_metrics_out() -> None:
    values = figures([{"tokens": 4}], [[[1, 1]]], model(1, 4, 1)).value
    assert values.keys() == {"device_copies", "node_copies", "balance", "balance_p95"}


VALUES = arrays.arrays(np.float64, st.tuples(st.integers(2, 9), st.just(2)), elements=st.floats(0, 1e6))


def naive_draws(values: np.ndarray, seed: int) -> np.ndarray:
    """The sums of every draw, each drawn and added by itself."""
    rng = np.random.default_rng(seed)
    return np.array([values[rng.integers(len(values), size=len(values))].sum(axis=0) for _ in range(DRAWS)])


@given(VALUES, st.integers(0, 99))
def test_resampled_sums_are_those_of_draws_one_by_one(values_UC: np.ndarray, seed: int) -> None:
    sums_RC = resampled_sums(values_UC, seed=seed)
    np.testing.assert_allclose(sums_RC[0], values_UC.sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(sums_RC[1:], naive_draws(values_UC, seed), rtol=1e-9, atol=1e-6)


@given(VALUES, st.integers(0, 99))
def test_a_gain_is_paired_and_its_errors_are_those_of_each_source(values_UC: np.ndarray, seed: int) -> None:
    """Two sources, one of which only one side has; levels err together, sources alone."""
    sums_RC = resampled_sums(values_UC, seed=seed) / len(values_UC)
    ours = {"links": np.stack([sums_RC[:, 0] * level for level in (0.9, 1.0, 1.2)])}
    theirs = {"links": np.stack([sums_RC[:, 1] * level for level in (0.8, 1.0, 1.1)]), "experts": sums_RC[None, :, 0]}
    lows, highs = [], []
    for mine, other in naive_draws(values_UC, seed) / len(values_UC):
        levels = [other * b - mine * a for a, b in ((0.9, 0.8), (1.0, 1.0), (1.2, 1.1))]
        lows.append(min(levels) + mine)
        highs.append(max(levels) + mine)
    ends = np.array(interval(difference(ours, theirs)), np.float64)
    np.testing.assert_allclose(ends, (np.quantile(lows, 0.025), np.quantile(highs, 0.975)), rtol=1e-7, atol=1e-5)


def test_a_single_row_is_not_resampled_and_an_undefined_figure_has_no_interval() -> None:
    assert [len(resampled_sums(np.ones((rows, 1)), seed=0)) for rows in (1, 2)] == [1, 1 + DRAWS]
    assert interval({"": np.full((1, 10), np.nan)}) == (None, None)


Levels = tuple[float, float]  # of a curve, over its middle
LOOSE = (0.5, 2.0)
TOLD = 8 + 8  # bytes of counts where tokens stay, of steps without samples: of samples, of tokens before the layer


def curve(levels: Levels, work: Callable[..., Any]) -> Callable[..., Prediction]:
    """A curve of as many seconds as there is work."""

    def predicted(*sizes: Any) -> Prediction:
        seconds = work(*sizes)
        return Prediction(seconds, levels[0] * seconds, levels[1] * seconds, np.zeros(seconds.shape, bool))

    return predicted


def timed(levels: Levels = (0.8, 1.5), **seconds: list[int]) -> Figures:
    """The figures of one layer on two devices whose parts take these seconds step by step, exchanges none unless said.

    Work is all on device 0; a part errs as its curve does.
    """
    num_steps, cluster = len(next(iter(seconds.values()))), Cluster.parse("1x2")

    def on_device_0(part: str, default: int) -> Any:
        return np.stack([np.array(seconds.get(part, [default] * num_steps)), np.zeros(num_steps, int)], axis=1)[:, None]

    dispatch, combine = (
        np.stack([one, np.zeros_like(one)], axis=2)[:, :, None]
        for one in map(on_device_0, ("dispatch", "combine"), (0, 0))
    )
    ports = Ports(dispatch, combine, 0 * dispatch[:, :, 0], on_device_0("kv", 1), on_device_0("attention", 1))
    tally = Tally(np.ones((3, len(COUNTS)), int), on_device_0("experts", 0), np.ones(2, int), ports)
    costs = CostModel(
        exchange=[curve(levels, lambda port, *_: port)],
        gather=[curve(levels, lambda port: port)],
        experts=curve(levels, lambda pairs, _: pairs),
        attention=curve(levels, lambda batch, length, _: batch * length**2) if "attention" in seconds else None,
        sources={},
        missing={},
        other_dtype=(),
    )
    nothing: Any = None
    scene = Scene(nothing, nothing, [], cluster, ONE, costs, seed=2)
    way: DispatchModel = "coherent" if "kv" in seconds else "standard"
    journey = Journey(way, Placement.from_sets([[[0], [1]]], 2))
    (only,) = figures_of([Context(tally, price(tally, journey, scene), way, ONE, 4)], seed=2)
    return only


def test_seconds_are_means_over_steps_whose_interval_holds_the_fits_error_and_the_steps() -> None:
    step = timed(experts=[1, 2, 6, 3]).metrics()["step_s"]
    low, high = np.quantile(naive_draws(np.array([1, 2, 6, 3]), seed=2) / 4, (0.025, 0.975))
    assert (step.low, step.value, step.high) == pytest.approx((0.8 * low, 3.0, 1.5 * high))


def test_a_pipelined_gain_is_the_least_over_every_pair_of_the_levels_of_exchanges_and_experts() -> None:
    exchange, experts = np.array([3.0, 4.0, 5.0]), np.array([2.0, 3.0, 4.5])

    def pipelined(moe: Callable[..., float]) -> Figures:
        step = {
            "moe": [[moe(x, e)] * 2 for x in exchange for e in experts],
            "attention": [[0.8] * 2, [1] * 2, [1.5] * 2],
        }
        seconds = Seconds({"step_s": np.zeros((3, 2))}, {name: np.array(levels) for name, levels in step.items()})
        tally = Tally(np.ones((1, len(COUNTS)), int), np.ones((2, 2, 2), int), np.ones(2, int))
        return figures_of([Context(tally, seconds, "standard", MODEL, 4)], seed=2)[0]

    step = pipelined(max).metrics()["step_s"]
    assert (step.low, step.value, step.high) == pytest.approx((3.8, 5.0, 6.5))
    gain = pipelined(max).gain("step_s", pipelined(lambda exchange, *_: exchange))
    assert (gain.low, gain.value, gain.high) == pytest.approx((3.0 - 4.5, 0.0, 0.0))


@pytest.mark.parametrize(
    ("ours", "theirs", "low", "high"),
    [
        ({"experts": 4}, {"experts": 6}, 1, 4),
        ({"experts": 3}, {"experts": 3}, 0, 0),
        # One source slow where the other is fast; counts are told by the curve of K and V
        ({"dispatch": 10, "kv": 8}, {"dispatch": 20}, 5 - 2 * (8 + TOLD), 20 - (8 + TOLD) / 2),
        ({"dispatch": 10, "experts": 8}, {"dispatch": 20}, 5 - 16, 20 - 4),
        ({"experts": 10, "attention": 9}, {"experts": 20, "attention": 1}, 5 - 16, 20 - 4),
        ({"dispatch": 10, "combine": 4}, {"dispatch": 7, "combine": 8}, 0.5, 2),  # one curve times both
    ],
)
def test_a_gain_errs_with_each_source_alone(ours: Any, theirs: Any, low: float, high: float) -> None:
    """Each curve is good to a factor of 2."""
    mine, other = (timed(LOOSE, **{name: [one] * 4 for name, one in side.items()}) for side in (ours, theirs))
    gain = mine.gain("step_s", other)
    value = sum(theirs.values()) - sum(ours.values()) - TOLD * ("kv" in ours)
    assert (gain.value, gain.low, gain.high) == pytest.approx((value, low, high))
    exchange = [one.value.get(f"{name}_s", 0.0) for one in (mine, other) for name in ("dispatch", "combine")]
    assert mine.gain("exchange_s", other).value == pytest.approx(sum(exchange[2:]) - sum(exchange[:2]))


def test_one_step_has_the_fits_error_as_its_interval_and_shows_no_gain() -> None:
    step = timed(experts=[2]).metrics()["step_s"]
    assert (step.value, step.low, step.high) == pytest.approx((2.0, 1.6, 3.0))
    gain = timed(experts=[1]).gain("step_s", timed(experts=[2]))
    assert (gain.value, gain.low, gain.high) == (1.0, None, None)
    assert timed((1.0, 1.0), experts=[2]).metrics()["step_s"].low is None  # by curves without error


def test_steps_compare_where_both_are_timed_and_of_the_same_passes() -> None:
    forward = timed(experts=[1])
    trained = Figures({**forward.summands, "moe_backward_s": {"": np.ones((1, 1))}})
    untimed = figures([{"tokens": 4}], [[[1, 1]]])
    assert forward.step_compares(timed(experts=[2]))
    assert trained.step_compares(trained)
    for one, other in ((forward, trained), (trained, forward), (untimed, untimed), (forward, untimed)):
        assert not one.step_compares(other)


def evaluated(**values: float) -> Evaluated:
    """A plan of so many bytes, or seconds, beside 100, each surely known."""
    row = Row(name="plan", dispatch_model="migrating", metrics={})
    nobody = Part(num_samples=1, num_tokens=1, num_steps=1, dropped_samples=0, tokens_per_step=1, contenders=(row,))
    whole = values | ({"attention_s": 1.0} if "step_s" in values else {})
    plan, base = (
        Figures({name: {"": np.full((1, 9), value)} for name, value in of.items()})
        for of in (whole, dict.fromkeys(whole, 100.0))
    )
    judged = {"plan/migrating": plan, "contiguous/standard": base}
    return Evaluated(Evaluation(fit=nobody, held_out=None), judged, None)


@pytest.mark.parametrize(
    ("ours", "at_least", "value"),
    [
        (98.9, 0.0, "benefit"),
        (98.9, 0.02, "none"),
        (98.0, 0.02, "none"),
        (97.9, 0.02, "benefit"),
        (99.1, 0.0, "none"),
        (101, 0.0, "none"),
    ],
)
def test_a_gain_pays_from_one_percent_of_today_on_and_above_a_share_that_seconds_need_not(
    ours: float, at_least: float, value: str
) -> None:
    for seconds, expected in (
        ({}, (value, at_least, "inter_bytes")),
        ({"step_s": ours}, ("benefit" if ours < 99 else "none", 0.0, "step_s")),
    ):
        judged = verdict(evaluated(inter_bytes=ours, **seconds), "inter_bytes", at_least=at_least)
        assert (judged.value, judged.at_least, judged.metric) == expected
