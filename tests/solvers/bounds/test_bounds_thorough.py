import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from moeplan.solvers.bounds import kept_bound, thorough_bound

Array = NDArray[Any]
BruteForce = Callable[[Array, list[int], Array], float]

SIZES = [(2, 4, 2), (3, 6, 2), (3, 6, 3), (4, 4, 2)]  # layers, experts, experts a device


def least_of_column_generation(weights: Array, size: int) -> float:
    """The linear programme over all columns: a group of each of two or three layers, every expert in one."""
    num_experts, num_layers = weights.shape[1], len(weights) + 1
    groups = list(itertools.combinations(range(num_experts), size))
    columns = list(itertools.product(groups, repeat=num_layers))
    worth = [sum(w[np.ix_(*column[cut : cut + 2])].sum() for cut, w in enumerate(weights)) for column in columns]
    holds = np.zeros((num_layers, num_experts, len(columns)))
    for number, column in enumerate(columns):
        for layer, group in enumerate(column):
            holds[layer, list(group), number] = 1
    rows = holds.reshape(num_layers * num_experts, -1)
    return -float(linprog(-np.array(worth), A_eq=rows, b_eq=np.ones(len(rows)), method="highs").fun)


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from([(2, 4, 2), (3, 6, 2), (3, 6, 3), (4, 4, 2)]), st.integers(0, 2**32), st.sampled_from([0.0, 1.0])
)
def test_no_placement_keeps_more_and_the_simple_bound_is_never_less(
    brute_force: BruteForce, case: tuple[int, int, int], seed: int, known: float
) -> None:
    num_layers, num_experts, size = case
    weights = np.random.default_rng(seed).integers(0, 9, (num_layers - 1, num_experts, num_experts)).astype(float)
    slots = np.full(num_experts // size, size)
    best = brute_force(weights, slots.tolist(), np.eye(len(slots)))
    found = thorough_bound(weights, slots, kept=known * best, time_limit_s=0.5)
    assert best <= found.value <= kept_bound(weights, slots).value


@pytest.mark.parametrize(("num_layers", "size"), [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("scale", [1.0, 1e-7, 3e13])
def test_two_and_three_layers_get_the_bound_of_column_generation(
    rng: np.random.Generator, num_layers: int, size: int, scale: float
) -> None:
    weights = rng.exponential(1, (num_layers - 1, 6, 6))
    slots = np.full(6 // size, size)
    least = least_of_column_generation(weights, size) * scale
    weights *= scale
    found = thorough_bound(weights, slots, time_limit_s=20)
    assert least * (1 - 1e-9) <= found.value <= least * 1.003
    assert least < kept_bound(weights, slots).value * 0.99
    assert found.kind == ("two-layer" if num_layers == 2 else "three-layer")


def test_triples_are_bounded_better_than_their_pairs(rng: np.random.Generator) -> None:
    weights, slots = rng.dirichlet(np.full(8, 0.3), (4, 8)), np.full(4, 2)
    pairs = sum(thorough_bound(weight[None], slots, time_limit_s=60).value for weight in weights)
    assert thorough_bound(weights, slots, time_limit_s=60).value < pairs * 0.995


def test_block_structure_ends_the_search_where_the_bound_meets_what_is_kept() -> None:
    weights = np.stack([np.kron(np.eye(3), np.ones((3, 3)))] * 3) + 0.01
    kept = 3 * 27 * 1.01
    found = thorough_bound(weights, np.full(3, 3), kept=kept, time_limit_s=60)
    assert found.value == pytest.approx(kept)


@pytest.mark.parametrize(
    ("slots", "reason"),
    [([1] * 6, "one expert"), ([3, 2, 1], "unequal"), ([4, 3], "replicas"), ([4, 4], "replicas"), ([6], "no tighter")],
)
def test_where_triples_say_nothing_new_the_simple_bound_stands(
    rng: np.random.Generator, slots: list[int], reason: str
) -> None:
    weights = rng.dirichlet(np.full(6, 0.3), (3, 6))
    found, simple = thorough_bound(weights, np.array(slots)), kept_bound(weights, np.array(slots))
    assert (found.value, found.kind, found.proof) == (simple.value, simple.kind, None)
    assert reason in found.reason
    assert thorough_bound(weights[:0], np.array(slots)).value == 0.0


def test_more_groups_than_can_be_searched_take_no_time(rng: np.random.Generator) -> None:
    weights, slots = rng.dirichlet(np.full(32, 0.3), (2, 32)), np.full(2, 16)
    found, simple = thorough_bound(weights, slots), kept_bound(weights, slots)
    assert (found.value, found.kind, found.proof) == (simple.value, simple.kind, None)
    assert "6.0e+08 groups of 16 experts" in found.reason


def test_bounds_only_improve_and_the_same_inputs_give_the_same(rng: np.random.Generator) -> None:
    weights, slots = rng.dirichlet(np.full(8, 0.3), (3, 8)), np.full(4, 2)
    runs: list[list[float]] = [[], []]
    found = [thorough_bound(weights, slots, on_progress=run.append) for run in runs]
    assert found[0] == found[1]
    assert runs[0] == runs[1] == sorted(runs[0], reverse=True)
    assert found[0].value == runs[0][-1]


@pytest.mark.parametrize("size", [4, 8])
def test_a_time_limit_is_kept_and_leaves_a_bound(rng: np.random.Generator, size: int) -> None:
    weights, slots = rng.dirichlet(np.full(32, 0.1), (5, 32)), np.full(32 // size, size)
    thorough_bound(weights, slots, time_limit_s=0.1)  # compiled by then
    started = time.perf_counter()
    found = thorough_bound(weights, slots, time_limit_s=2)
    assert time.perf_counter() - started < 20  # unlimited, groups of 4 take twice that
    contiguous = weights.reshape(5, 32 // size, size, 32 // size, size)
    assert np.einsum("lxaxb->", contiguous) <= found.value <= kept_bound(weights, slots).value


def test_ctrl_c_ends_the_searches_and_leaves_a_bound(rng: np.random.Generator) -> None:
    weights, slots = rng.dirichlet(np.full(32, 0.1), (5, 32)), np.full(3, 8)
    weights = weights[:, :24, :24]
    thorough_bound(weights, slots, time_limit_s=0.1)  # compiled by then
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))

    def start(_: float) -> None:
        if timer.ident is None:
            timer.start()

    started = time.perf_counter()
    try:
        found = thorough_bound(weights, slots, time_limit_s=600, on_progress=start)
    finally:
        timer.cancel()
    assert found.interrupted
    assert time.perf_counter() - started < 60
    contiguous = weights.reshape(5, 3, 8, 3, 8)
    assert np.einsum("lxaxb->", contiguous) <= found.value <= kept_bound(weights, slots).value


@pytest.mark.parametrize("num_layers", [2, 3, 5])
@pytest.mark.parametrize("even", [True, False])
def test_ties_are_bounded_by_what_is_kept(num_layers: int, even: bool) -> None:
    weights = (
        np.ones((num_layers - 1, 6, 6))
        if even
        else np.tile(np.kron(np.eye(3), np.ones((2, 2))), (num_layers - 1, 1, 1))
    )
    found = thorough_bound(weights, np.full(3, 2), time_limit_s=60)
    assert found.value == (num_layers - 1) * 12
    assert thorough_bound(weights * 0, np.full(3, 2), time_limit_s=60).value == 0


class ReachedError(Exception):
    """A bound as good as asked for."""


@pytest.mark.parametrize(("num_devices", "share"), [(16, 0.47), (8, 0.61)])
def test_real_routing_is_bounded_within_a_few_percent_of_what_is_kept(
    gpt_oss: Path, num_devices: int, share: float
) -> None:
    with np.load(gpt_oss) as arrays:
        first_TL = arrays["expert_ids"][:, :, 0].astype(np.int64)
    pairs = first_TL[:, :-1] * 32 + first_TL[:, 1:]
    weights = np.array([np.bincount(pair, minlength=1024) for pair in pairs.T], dtype=float).reshape(-1, 32, 32)

    def stop(bound: float) -> None:
        if bound <= share * weights.sum():
            raise ReachedError

    with pytest.raises(ReachedError):
        thorough_bound(weights, np.full(num_devices, 32 // num_devices), time_limit_s=300, on_progress=stop)
