import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.planner.measures.intervals import interval, resampled_sums
from moeplan.planner.measures.metrics import Figures, figures
from moeplan.planner.measures.tally import COUNTS, Tally
from moeplan.profilers.fits.prediction import Prediction
from moeplan.solvers.seconds import total
from moeplan.traces.model import Attention, ModelSpec

MODEL = ModelSpec(
    name="m",
    layer_ids=(0, 1),
    num_experts=4,
    top_k=1,
    hidden_size=10,
    dtype_bytes=2,
    attention=Attention(kv_size=5),
)


def tally(rows: list[dict[str, int]], loads: list[list[list[int]]]) -> Tally:
    counts = np.array([[row.get(name, 0) for name in COUNTS] for row in rows], dtype=np.int64)
    return Tally(counts, np.array(loads, dtype=np.int64), np.ones(len(loads[0][0]), dtype=np.int64))


def test_shares_copies_balance_and_bytes_by_hand() -> None:
    rows = [
        {
            "tokens": 4,
            "hops": 4,
            "hops_kept": 1,
            "node_hops_kept": 3,
            "device_copies": 6,
            "node_copies": 2,
            "far_copies": 3,
        },
        {"tokens": 6, "hops": 6, "hops_kept": 4, "node_hops_kept": 6, "device_copies": 4, "node_copies": 0},
    ]
    found = figures(
        tally(rows, [[[6, 4], [9, 1]], [[5, 5], [0, 0]]]), MODEL, coherent=True, tokens_per_step=5, seed=0
    ).value
    assert found["hops_kept"] == 0.5
    assert found["node_hops_kept"] == 0.9
    assert found["device_copies"] == 10 / 20
    assert found["node_copies"] == 2 / 20
    assert found["balance"] == pytest.approx((6 / 5 + 9 / 5 + 5 / 5) / 3)  # the idle layer of step 1 has no balance
    assert found["inter_bytes"] == pytest.approx(3 / 20 * 2 * 5 * 10 * 2)
    assert found["intra_bytes"] == pytest.approx(7 / 20 * 2 * 5 * 10 * 2)
    assert found["kv_bytes"] == pytest.approx(5 * 2 * 1 * 5 * 2)


def test_sizes_that_are_unknown_leave_their_metrics_out() -> None:
    bare = ModelSpec(name="m", layer_ids=(0,), num_experts=4, top_k=1)
    found = figures(tally([{"tokens": 4}], [[[1, 1]]]), bare, coherent=True, tokens_per_step=4, seed=0).value
    assert found.keys() == {"device_copies", "node_copies", "balance", "balance_p95"}


def test_a_gain_is_paired_so_that_a_constant_gain_has_no_width() -> None:
    rng = np.random.default_rng(0)
    tokens, copies = rng.integers(5, 50, size=40), rng.integers(0, 90, size=40)
    base = [{"tokens": int(t), "device_copies": int(c + t)} for t, c in zip(tokens, copies, strict=True)]
    less = [{"tokens": int(t), "device_copies": int(c)} for t, c in zip(tokens, copies, strict=True)]
    theirs, ours = (
        figures(tally(rows, [[[1, 1], [1, 1]]]), MODEL, coherent=False, tokens_per_step=1, seed=1)
        for rows in (base, less)
    )
    gain = ours.gain("device_copies", theirs)
    assert (gain.value, gain.low, gain.high) == pytest.approx((0.5, 0.5, 0.5))
    assert np.ptp(ours.draws["device_copies"]) > 0


@given(st.integers(2, 30), st.integers(0, 2**31))
def test_resampled_sums_are_sums_of_as_many_rows_drawn_with_replacement(num_rows: int, seed: int) -> None:
    ones_and_powers = np.stack([np.ones(num_rows), 2.0 ** np.arange(num_rows)], axis=1)
    sums = resampled_sums(ones_and_powers, seed=seed)
    assert (sums[:, 0] == num_rows).all()
    draw = np.random.default_rng(seed).integers(num_rows, size=num_rows)
    assert sums[0, 1] == ones_and_powers[draw, 1].sum()


def test_a_95_percent_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for seed in range(100):
        tokens = rng.integers(1, 60, size=80)
        values = np.stack([tokens, rng.binomial(tokens, 0.3)], axis=1)
        sums = resampled_sums(values, seed=seed)
        low, high = interval(sums[:, 1] / sums[:, 0])
        assert low is not None
        assert high is not None
        hits += low <= 0.3 <= high
    assert 85 <= hits <= 100


def test_an_undefined_figure_has_no_interval() -> None:
    assert interval(np.full(10, np.nan)) == (None, None)


def prediction(seconds: list[float], low: float = 0.8, high: float = 1.5) -> Prediction:
    t = np.array(seconds)
    return Prediction(t, low * t, high * t, np.zeros(len(t), dtype=bool))


def of_parts(**parts: Prediction) -> Figures:
    loads = [[[1, 1], [1, 1]]] * len(next(iter(parts.values())).seconds)
    found = {**parts, "step_s": total(list(parts.values()))}
    return figures(tally([{"tokens": 4}], loads), MODEL, coherent=False, tokens_per_step=4, seed=2, seconds=found)


def timed(seconds: list[float], **factors: float) -> Figures:
    return of_parts(experts_s=prediction(seconds, **factors))


def test_seconds_are_means_over_steps_whose_interval_holds_the_fits_error_and_the_steps() -> None:
    found = timed([1.0, 2.0, 6.0, 3.0]).metrics()["step_s"]
    assert found.value == 3.0
    assert found.low is not None
    assert found.high is not None
    picks = np.random.default_rng(2)
    means = np.array([np.array([1.0, 2, 6, 3])[picks.integers(4, size=4)].mean() for _ in range(1000)])
    assert found.low == pytest.approx(0.8 * np.quantile(means, 0.025))
    assert found.high == pytest.approx(1.5 * np.quantile(means, 0.975))


def test_a_pipelined_gain_is_the_least_over_every_pair_of_the_levels_of_exchanges_and_experts() -> None:
    exchange, experts = np.array([3.0, 4.0, 5.0]), np.array([2.0, 3.0, 4.5])

    def pipelined(moe: Callable[..., float]) -> Figures:
        crossed_QB = np.repeat([[moe(x, e)] for x in exchange for e in experts], 2, axis=1)
        levels = [np.full(2, moe(x, e)) for x, e in zip(exchange, experts, strict=True)]
        found = {"moe_s": Prediction(levels[1], levels[0], levels[2], np.zeros(2, dtype=bool))}
        found["attention_s"] = prediction([1.0, 1.0])
        found["step_s"] = total(list(found.values()))
        loads = [[[1, 1], [1, 1]]] * 2
        rows = tally([{"tokens": 4}], loads)
        return figures(rows, MODEL, coherent=False, tokens_per_step=4, seed=2, seconds=found, crossed=crossed_QB)

    step = pipelined(max).metrics()["step_s"]
    assert (step.low, step.value, step.high) == pytest.approx((3.8, 5.0, 6.5))
    gain = pipelined(max).gain("step_s", pipelined(lambda exchange, *_: exchange))
    assert (gain.low, gain.value, gain.high) == pytest.approx((3.0 - 4.5, 0.0, 0.0))


def test_a_gain_in_one_source_is_the_widest_over_its_curves_low_middle_and_high() -> None:
    theirs, ours = timed([2.0, 4.0, 8.0, 4.0]), timed([1.0, 2.0, 4.0, 2.0])
    gain = ours.gain("step_s", theirs)
    half = ours.metrics()["step_s"]
    assert (gain.value, gain.low, gain.high) == pytest.approx((half.value, half.low, half.high))
    assert timed([3.0, 3.0]).gain("step_s", timed([3.0, 3.0])).high == 0.0


def test_a_gain_counts_on_one_source_being_slow_where_the_other_is_fast() -> None:
    """The plan gathers K and V instead of half of the exchange; each curve is good to a factor of 2."""
    loose = {"low": 0.5, "high": 2.0}
    ours = of_parts(dispatch_s=prediction([10.0] * 4, **loose), kv_s=prediction([8.0] * 4, **loose))
    gain = ours.gain("step_s", of_parts(dispatch_s=prediction([20.0] * 4, **loose)))
    assert (gain.value, gain.low, gain.high) == pytest.approx((2.0, 5 - 16, 20 - 4))


def test_dispatch_and_combine_are_slow_together_because_one_curve_times_both() -> None:
    loose = {"low": 0.5, "high": 2.0}
    ours = of_parts(dispatch_s=prediction([10.0] * 4, **loose), combine_s=prediction([4.0] * 4, **loose))
    gain = ours.gain(
        "step_s", of_parts(dispatch_s=prediction([7.0] * 4, **loose), combine_s=prediction([8.0] * 4, **loose))
    )
    assert (gain.value, gain.low, gain.high) == pytest.approx((1.0, 0.5, 2.0))


@given(st.integers(0, 2**31))
def test_a_gains_interval_holds_every_mixture_of_fast_and_slow_sources(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = ("attention_s", "kv_s", "dispatch_s", "experts_s")
    both = [
        {name: prediction(rng.uniform(1, 9, 5).tolist(), *(rng.uniform(0.5, 1), 1 + rng.uniform())) for name in names}
        for _ in range(2)
    ]
    ours, theirs = (of_parts(**parts) for parts in both)
    gain = ours.gain("step_s", theirs)
    picks = np.random.default_rng(2)
    rows = np.array([picks.integers(5, size=5) for _ in range(1000)])
    assert gain.low is not None
    assert gain.high is not None
    for levels in itertools.product(("low", "seconds", "high"), repeat=len(names)):
        differ = sum(
            getattr(both[1][name], level) - getattr(both[0][name], level)
            for name, level in zip(names, levels, strict=True)
        )
        low, high = np.quantile(differ[rows].mean(axis=1), [0.025, 0.975])
        assert gain.low <= low + 1e-12
        assert high - 1e-12 <= gain.high


def test_one_step_has_the_fits_error_as_its_interval_and_shows_no_gain() -> None:
    found = timed([2.0])
    step = found.metrics()["step_s"]
    assert (step.value, step.low, step.high) == pytest.approx((2.0, 1.6, 3.0))
    gain = timed([1.0]).gain("step_s", found)
    assert (gain.value, gain.low, gain.high) == (1.0, None, None)


def test_one_step_by_curves_without_error_has_no_interval() -> None:
    assert timed([2.0], low=1.0, high=1.0).metrics()["step_s"].low is None


def test_steps_compare_where_both_have_attention_or_neither_and_one_dispatch_model() -> None:
    bare, whole = (
        of_parts(experts_s=prediction([1.0])),
        of_parts(experts_s=prediction([1.0]), attention_s=prediction([1.0])),
    )
    assert whole.step_compares(whole, alike=False)
    assert bare.step_compares(bare, alike=True)
    assert not bare.step_compares(bare, alike=False)
    assert not bare.step_compares(whole, alike=True)
    none = figures(tally([{"tokens": 4}], [[[1, 1]]]), MODEL, coherent=False, tokens_per_step=4, seed=2)
    assert not none.step_compares(none, alike=True)
