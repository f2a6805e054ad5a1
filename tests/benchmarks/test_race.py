"""The harness that takes time and memory."""

import gc

import numpy as np
import pytest

from benchmarks.race import peak_bytes, race


class Clock:
    """A clock that only its own calls move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_seconds_and_ratios_are_those_of_the_clock() -> None:
    clock = Clock()
    calls = {"slow": lambda: clock.wait(4.0), "fast": lambda: clock.wait(0.5)}
    found = race(calls, "slow", rounds=3, memory=False, clock=clock)
    assert (found["slow"].seconds, found["fast"].seconds) == pytest.approx((4.0, 0.5))
    assert (found["slow"].ratio, found["fast"].ratio) == pytest.approx((1.0, 8.0))


def test_one_slow_round_moves_neither_median_nor_ratio() -> None:
    clock, count = Clock(), iter(range(10**6))
    calls = {"base": lambda: clock.wait(2.0), "own": lambda: clock.wait(1000.0 if next(count) == 2 else 1.0)}
    found = race(calls, "base", rounds=5, memory=False, clock=clock)["own"]
    assert (found.seconds, found.least_s, found.ratio) == pytest.approx((1.0, 1.0, 2.0))


@pytest.mark.parametrize(("budget_s", "rounds"), [(1.0, 3), (5.0, 10), (5.4, 10), (100.0, 25)])
def test_the_budget_sets_how_often_calls_run_from_three_rounds_to_25(budget_s: float, rounds: int) -> None:
    clock, made = Clock(), {"a": 0, "b": 0}

    def call(name: str, seconds: float) -> None:
        made[name] += 1
        clock.wait(seconds)

    race({"a": lambda: call("a", 0.2), "b": lambda: call("b", 0.3)}, budget_s=budget_s, memory=False, clock=clock)
    assert made == {"a": 1 + rounds, "b": 1 + rounds}  # warmed up by one call


def test_a_short_call_is_warmed_up_twice_and_runs_in_bursts() -> None:
    clock, made = Clock(), [0]

    def call() -> None:
        made[0] += 1
        clock.wait(0.05 if made[0] == 1 else 2.0**-10)  # the first one loads

    found = race({"": call}, rounds=3, memory=False, clock=clock)[""]
    assert made[0] == 2 + 3 * 3  # 3 of 2**-10 s are the least that last 0.002 s
    assert found.seconds == 2.0**-10


def test_calls_take_turns_with_the_collector_off() -> None:
    order: list[str] = []
    enabled: list[bool] = []

    def call(name: str) -> None:
        order.append(name)
        enabled.append(gc.isenabled())

    race({"a": lambda: call("a"), "b": lambda: call("b")}, rounds=2, memory=False)
    changes = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    assert changes == ["a", "b"] * 3  # warmed up, then two rounds
    assert not any(enabled[-2:])
    assert gc.isenabled()


def test_a_call_returns_its_value_and_its_memory_is_that_of_its_arrays() -> None:
    found = race({"ones": lambda: np.ones(10**6)}, rounds=1)["ones"]
    assert found.value.sum() == 10**6
    assert found.ratio is None
    assert found.memory_bytes is not None
    assert 8e6 <= found.memory_bytes < 8.1e6
    assert peak_bytes(lambda: np.ones(10**6)[:10].copy()) >= 8e6  # the peak, not what stays
