import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.solvers import quota
from moeplan.solvers.flexmoe import exact
from moeplan.solvers.flexmoe.state import slots_in


@given(st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=1, max_size=40), st.integers(1, 12))
def test_one_slot_more_than_experts_a_device_gives_every_device_the_mean(loads: list[float], num_devices: int) -> None:
    load_E = np.array(loads)
    table, served = exact(load_E, num_devices)
    assert table.shape == (num_devices, -(-len(loads) // num_devices) + 1)
    mean = load_E.sum() / num_devices
    assert served.sum(axis=1) == pytest.approx(np.full(num_devices, mean), rel=1e-9, abs=1e-9)
    assert (served >= -1e-9 * mean).all()
    of_expert = np.bincount(table[table >= 0], served[table >= 0], len(loads))
    assert of_expert == pytest.approx(load_E, rel=1e-9, abs=1e-9)
    for row in table:
        held = row[row >= 0]
        assert len({*held.tolist()}) == len(held)
    assert {*table[table >= 0].tolist()} == {*range(len(loads))}


@given(st.integers(0, 2**32), st.integers(1, 10), st.integers(1, 5), st.floats(0, 3))
def test_the_exact_split_of_whole_pairs_attains_the_mean_there(seed: int, size: int, each: int, steep: float) -> None:
    rng = np.random.default_rng(seed)
    share = rng.permutation(1 / np.arange(1, each * size + 1) ** steep)
    total = rng.multinomial(10_000, share / share.sum())
    table, _ = exact(total.astype(np.float64), size)
    most, _, _ = quota.least(total, slots_in(table, len(total)))
    assert most == -(-total.sum() // size)
