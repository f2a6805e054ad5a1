"""Oracles and inputs that the solver tests share."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[Any]


def deals(slots: list[int], num_experts: int) -> list[tuple[int, ...]]:
    """Every way to give each expert a home within the slots."""
    homes = itertools.product(range(len(slots)), repeat=num_experts)
    return [home for home in homes if all(home.count(d) <= slots[d] for d in range(len(slots)))]


def best_by_brute_force(transitions: Array, slots: list[int], near: Array) -> float:
    """The best value of any layout: every deal of every layer, layer by layer (Viterbi)."""
    homes = np.array(deals(slots, transitions.shape[1]))
    value = np.zeros(len(homes))
    for weight in transitions:
        step = np.array([[(weight * near[a[:, None], b]).sum() for b in homes] for a in homes])
        value = (value[:, None] + step).max(axis=0)
    return float(value.max())


@pytest.fixture(scope="session")
def brute_force() -> Callable[[Array, list[int], Array], float]:
    return best_by_brute_force


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
