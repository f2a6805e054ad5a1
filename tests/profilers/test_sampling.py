"""Sampling and its statistics: intervals that hold, repeats that adapt, noise that is told."""

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from moeplan.profilers.measurement import MIN_SAMPLES, Measurement, median_interval, relative_width
from moeplan.profilers.origin import Noise
from moeplan.profilers.sampling import MAX_REPEATS, NARROW, sample


@given(samples=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=60))
def test_the_interval_is_the_narrowest_that_holds_the_median_95_times_of_100(samples: list[float]) -> None:
    n, ascending = len(samples), sorted(samples)

    def coverage(k: int) -> float:
        return float(1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n)

    k = max((k for k in range(1, n // 2 + 1) if coverage(k) >= 0.95), default=1)
    assert median_interval(samples) == (ascending[k - 1], ascending[n - k])


def test_the_interval_holds_the_true_median_of_a_skewed_law() -> None:
    rng = np.random.default_rng(0)
    held = [
        low <= 1.0 <= high for low, high in (median_interval(rng.lognormal(0, 1, 30).tolist()) for _ in range(2000))
    ]
    assert 0.945 <= np.mean(held) <= 0.985


class Scripted:
    """A clock whose calls take seconds off a list."""

    def __init__(self, seconds: Iterator[float]) -> None:
        self.seconds = seconds

    def time(self, call: Callable[[], Any]) -> float:
        call()
        return next(self.seconds)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_steady_call_is_repeated_six_times_and_an_unsteady_one_as_often_as_there_is_time() -> None:
    calls: list[int] = []
    steady = sample(Scripted(itertools.repeat(1e-3)), lambda: calls.append(1), budget_s=5.0)
    assert len(steady) == MIN_SAMPLES == len(calls)
    unsteady = sample(Scripted(itertools.cycle([1e-3, 3e-3])), lambda: None, budget_s=5.0)
    assert len(unsteady) == MAX_REPEATS
    settling = sample(Scripted(itertools.chain([2e-3] * 6, [1e-3, 5e-3], itertools.repeat(1e-3))), print, budget_s=5.0)
    assert len(settling) == MIN_SAMPLES


@pytest.mark.usefixtures("alone")
def test_time_that_is_spent_ends_the_repeats_but_not_before_there_is_an_interval() -> None:
    assert len(sample(Scripted(itertools.cycle([1e-3, 3e-3])), lambda: None, budget_s=0.0)) == 1

    def slow() -> None:
        for _ in range(300_000):
            pass

    taken = len(sample(Scripted(itertools.cycle([1e-3, 3e-3])), slow, budget_s=0.02))
    assert 1 <= taken < MAX_REPEATS


def test_a_narrow_interval_needs_six_samples() -> None:
    assert relative_width([1.0] * 5) == math.inf
    assert relative_width([1.0] * 6) == 0
    assert relative_width([1.0, 1.01, 1.02, 1.03, 1.04, 1.05]) < NARROW
    assert relative_width([1.0, 1.0, 1.0, 1.0, 1.0, 1.06]) == pytest.approx(0.06)


def sized(*samples_s: float) -> Measurement:
    return Measurement.of({"bytes": 8}, 8, samples_s)


def test_a_machine_is_noisy_when_a_fifth_of_the_medians_is_loose_or_the_reference_drifts() -> None:
    tight, loose, few = sized(*[1.0] * 6), sized(1.0, 1.0, 1.0, 1.0, 1.0, 1.3), sized(1.0)
    quiet = Noise.of([tight] * 4 + [loose], [1e-3, 1.1e-3])
    assert (quiet.sizes, quiet.wide, quiet.noisy) == (5, 1, False)
    assert "quiet enough: 1 of 5 medians (20 %)" in str(quiet)
    noisy = Noise.of([tight] * 3 + [loose, few], [1e-3, 1.1e-3])
    assert (noisy.wide, noisy.noisy) == (2, True)
    assert "NOISY: 2 of 5 medians (40 %)" in str(noisy)
    drifting = Noise.of([tight], [1e-3] * 5 + [9e-3] * 5)
    assert drifting.noisy
    assert "varied 9.00 times" in str(drifting)
