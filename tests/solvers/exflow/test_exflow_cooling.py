import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.solvers.exflow.budget import COLD, COLDER, HOTTER, Cooling
from moeplan.solvers.exflow.programme import Programme, Terms

TWO_LEVELS = np.kron(np.eye(2), np.full((2, 2), 4.0)) + 3 * np.eye(4)  # 7 on a device, 4 on a node
SHARES = np.linspace(0, 1, 11)


def programme_of(*weights: list[list[float]], near: float = 1.0) -> Programme:
    size = len(weights[0]) if weights else 2
    sizes = (size,) * (len(weights) + 1)
    return Programme([np.array(one) for one in weights], sizes, np.array([1, 1]), near * np.eye(2), 2)


def temperatures(cooling: Cooling) -> list[float]:
    return [cooling.at(share) for share in SHARES]


def share_decided(temperature: float, units: np.ndarray, hot: float) -> float:
    """The formula, unit by unit."""
    total = 0.0
    for unit in units:
        total += unit * min(1.0, max(0.0, np.log(hot * unit / temperature) / np.log(hot / COLD)))
    return total / float(units.sum())


@pytest.mark.parametrize("size", [1, 4, 10, 32])
def test_of_more_than_four_experts_a_device_either_end_is_hotter(size: int) -> None:
    weights, slots = [np.ones((2 * size, 2 * size))] * 2, np.array([size, 0, size + 3])
    cooling = Cooling(Programme(weights, (2 * size,) * 3, slots, np.eye(3), 3), Terms(), 1.25)
    more = max(size / 4, 1.0)
    expected = [1.25 * more**HOTTER, COLD * more**COLDER]
    assert [cooling.at(share) for share in (0, 1)] == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("hot", [0.65, 1.25])
def test_of_weights_alike_the_temperature_falls_geometrically_from_hot_to_cold(hot: float) -> None:
    cooling = Cooling(programme_of([[3.0, 3.0], [3.0, 3.0]], near=2.0), Terms(), hot)
    assert temperatures(cooling) == pytest.approx([6 * hot * (COLD / hot) ** share for share in SHARES], rel=5e-3)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.sampled_from([0.2, 1.0, 3.0]))
def test_the_share_of_time_above_a_temperature_is_that_of_the_units_decided_there(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.lognormal(0, spread, (8, 8)) * rng.lognormal(0, spread, (8, 1))
    units = np.sqrt(np.concatenate([(weight**2).mean(axis=0), (weight**2).mean(axis=1)]))
    cooling = Cooling(Programme([weight], (8, 8), np.array([4, 4]), np.eye(2), 2), Terms(), 1.25)
    found = temperatures(cooling)
    assert found == sorted(found, reverse=True)
    for share, temperature in zip(SHARES, found, strict=True):
        assert share_decided(temperature, units, 1.25) == pytest.approx(share, abs=0.03)


def test_a_unit_is_worth_what_a_device_is_more_than_its_node_and_pairs_of_a_layer_have_one_too() -> None:
    programme = Programme([np.full((2, 2), 5.0)], (2, 2), np.array([1, 1, 0, 0]), TWO_LEVELS, 2)
    assert Cooling(programme, Terms(), 1.0).at(0) == pytest.approx(3 * 5.0, rel=5e-3)
    beside = np.array([[[0.0, 2.0], [2.0, 0.0]]] * 2)  # 2 ** 0.5 each
    assert Cooling(programme, Terms(beside=beside), 1.0).at(1) == pytest.approx(3 * 2**0.5 * COLD, rel=5e-3)


@pytest.mark.parametrize("seed", range(5))
def test_units_alike_but_for_rounding_are_alike(seed: int) -> None:
    one = np.eye(16)[np.random.default_rng(seed).permutation(16)]
    weight = 0.6 * one + 0.3 * np.roll(one, 1, axis=1) + 0.1 / 16
    cooling = Cooling(Programme([weight], (16, 16), np.full(4, 4), np.eye(4), 4), Terms(), 1.0)
    assert cooling.at(0) == pytest.approx(np.sqrt((weight**2).mean()), rel=5e-3)
    assert cooling.at(1) == pytest.approx(cooling.at(0) * COLD, rel=5e-3)


def test_experts_without_weight_set_no_temperature() -> None:
    idle = programme_of([[3.0, 0.0], [0.0, 0.0]])
    assert Cooling(idle, Terms(), 1.0).at(1) == pytest.approx(4.5**0.5 * COLD, rel=5e-3)
    for nothing in (programme_of(), programme_of([[0.0, 0.0], [0.0, 0.0]])):
        assert Cooling(nothing, Terms(), 1.0).at(0) == pytest.approx(1.0, rel=5e-3)
