import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.errors import UsageError
from moeplan.solvers.exflow import caps
from moeplan.solvers.exflow.caps import capped_layout


def highest(load_E: NDArray[Any], device_E: Any, slots: list[int]) -> float:
    return float(np.bincount(np.array(device_E), load_E, len(slots)).max())


def least_cap(loads: NDArray[Any], slots: list[int]) -> float:
    """The smallest cap over the mean that some placement keeps, by trying all."""
    deals = set(itertools.permutations([device for device, count in enumerate(slots) for _ in range(count)]))
    most_L = np.array([min(highest(load_E, deal, slots) for deal in deals) for load_E in loads])
    return float((most_L / loads.mean(axis=1)).max() * np.count_nonzero(slots) / loads.shape[1])


@pytest.mark.parametrize("slots", [[2, 2, 2], [3, 2, 1], [3, 3], [2, 4], [3, 0, 3]], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_a_cap_is_kept_or_refused_with_the_smallest_that_is(slots: list[int], seed: int) -> None:
    loads = np.random.default_rng(seed).integers(1, [5, 50, 1000][seed % 3], (3, 6)) / (seed + 1)
    least = least_cap(loads, slots)
    for cap in (max(1.0, least * (1 + 1e-7)), max(1.0, least * 1.05)):
        layout, cap_L, hurried = capped_layout(loads, np.array(slots), cap, time_limit_s=60)
        assert not hurried
        for load_E, device_E, most in zip(loads, layout, cap_L, strict=True):
            assert np.bincount(device_E, minlength=len(slots)).tolist() == slots
            assert highest(load_E, device_E, slots) <= most
    if least > 1.001:
        worst = int(np.argmax([least_cap(loads[[layer]], slots) for layer in range(3)]))
        with pytest.raises(UsageError, match=f"layer {worst} .* the smallest that any placement keeps") as refused:
            capped_layout(loads, np.array(slots), 1.0, time_limit_s=60)
        given = float(str(refused.value).split("give ")[1].split()[0])
        assert least <= given <= least + 1.01e-4


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_layer_that_is_unproven_spoils_no_proof_where_another_needs_more(
    order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hard, harder = [11, 10, 10, 19, 1, 3, 8, 15, 14], [60, 1, 1, 1, 1, 1, 1, 1, 1]  # 62 of 68 on one of three
    real = caps._evenest
    monkeypatch.setattr(caps, "_evenest", lambda load, *given: (real(load, *given)[0], load.max() == 60))
    with pytest.raises(UsageError, match=rf"give {62 * 3 / 68 + 5e-5:.4f} or more, the smallest that any"):
        capped_layout(np.array([hard, harder], float)[order], np.array([3, 3, 3]), 1.0, time_limit_s=60)


def test_where_the_layer_that_needs_most_is_unproven_nothing_is_said_of_all_placements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = caps._evenest
    monkeypatch.setattr(caps, "_evenest", lambda load, *given: (real(load, *given)[0], load.max() < 60))
    with pytest.raises(UsageError, match=r"no placement of layer 1 was found .* give 2\.7353 or more") as refused:
        capped_layout(np.array([[1] * 9, [60] + [1] * 8], float), np.array([3, 3, 3]), 1.0, time_limit_s=60)
    assert "any placement keeps" not in str(refused.value)
