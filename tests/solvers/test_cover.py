"""Covers of rows by kept ones: by hand, against exhaustive search, and in whatever order rows come."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.runtime.engine import clusters
from moeplan.solvers.cover import priority_cover, star_cover

COVERS = {"priority": priority_cover, "star": star_cover}
every_cover = pytest.mark.parametrize("cover", COVERS.values(), ids=COVERS)


def serves(size: int, *edges: tuple[int, int]) -> np.ndarray:
    """One block of rows that serve others, and themselves."""
    block = np.eye(size, dtype=bool)
    for kept, other in edges:
        block[kept, other] = True
    return block[None]


def drawn(seed: int, size: int, share: float) -> np.ndarray:
    """Random directed edges."""
    return (np.random.default_rng(seed).random((3, size, size)) < share) | np.eye(size, dtype=bool)


@every_cover
def test_no_edges_keep_every_row_and_all_edges_the_first(cover: Callable[[np.ndarray], np.ndarray]) -> None:
    assert cover(serves(4)).tolist() == [[0, 1, 2, 3]]
    assert cover(np.ones((2, 3, 3), dtype=bool)).tolist() == [[0] * 3] * 2


@every_cover
def test_rows_that_serve_most_are_kept_first(cover: Callable[[np.ndarray], np.ndarray]) -> None:
    assert cover(serves(5, (3, 0), (3, 1), (3, 2), (0, 1))).tolist() == [[3, 3, 3, 3, 4]]


def test_star_counts_again_what_is_left_and_priority_does_not() -> None:
    edges = serves(7, (0, 1), (0, 2), (0, 3), (4, 1), (4, 2), (5, 6))  # 4 serves two, of whom none is left after 0
    more = edges | serves(7, (5, 4))
    assert star_cover(more).tolist() == [[0, 0, 0, 0, 5, 5, 5]]
    assert priority_cover(more).tolist() == [[0, 0, 0, 0, 4, 5, 5]]


def test_a_row_that_serves_but_is_not_served_stays() -> None:
    assert priority_cover(serves(2, (1, 0))).tolist() == [[1, 1]]
    assert priority_cover(serves(2, (0, 1))).tolist() == [[0, 0]]


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 30), share=st.floats(0, 0.6))
def test_every_row_has_a_kept_one_that_serves_it_and_rounds_find_the_same(seed: int, size: int, share: float) -> None:
    block = drawn(seed, size, share)
    for cover in COVERS.values():
        kept = cover(block)
        for serves_nn, kept_n in zip(block, kept, strict=True):
            assert (kept_n[kept_n] == kept_n).all()
            assert serves_nn[kept_n, np.arange(size)].all()
    kept = priority_cover(block)
    assert torch.equal(clusters.rounds(torch.from_numpy(block)), torch.from_numpy(kept))
    for serves_nn, kept_n in zip(block, kept, strict=True):  # of no two kept rows does the earlier serve the later
        order = sorted(range(size), key=lambda row: (-serves_nn[row].sum(), row))
        chosen = [row for row in order if kept_n[row] == row]
        assert not any(serves_nn[first, later] for first, later in itertools.combinations(chosen, 2))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 14))
def test_rows_in_another_order_have_the_same_cover_where_no_two_serve_as_many(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    degrees = rng.permutation(size)
    block = np.eye(size, dtype=bool)
    for row, degree in enumerate(degrees):
        block[row, rng.permutation(np.setdiff1d(np.arange(size), row))[:degree]] = True
    new = rng.permutation(size)  # the row that comes to each place
    kept, again = priority_cover(block[None])[0], priority_cover(block[np.ix_(new, new)][None])[0]
    assert (new[again] == kept[new]).all()


def fewest(block: np.ndarray) -> int:
    """The least number of rows that serve all, by exhaustive search."""
    served = [sum(1 << int(other) for other in np.flatnonzero(row)) for row in block]
    everyone = (1 << len(block)) - 1
    for count in range(1, len(block) + 1):
        for chosen in itertools.combinations(served, count):
            if np.bitwise_or.reduce(np.array(chosen)) == everyone:
                return count
    raise AssertionError


def ratios(order: str) -> tuple[float, float]:
    """Rows kept over the fewest possible, on average and at most, of random points on the plane within reach."""
    found = list[float]()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(6, 13))
        x, reach = rng.random((size, 2)), rng.uniform(0.15, 0.5, size)
        block = np.linalg.norm(x[:, None] - x[None], axis=2) <= reach[None]
        covered = {"priority": priority_cover, "star": star_cover}.get(order)
        if covered is None:
            kept_n, by_degree = np.full(size, -1), np.argsort(block.sum(1), kind="stable")  # those that serve least
            for row in by_degree:
                if kept_n[row] < 0:
                    kept_n[block[row] & (kept_n < 0)] = row
        else:
            kept_n = covered(block[None])[0]
        found.append(len(np.unique(kept_n)) / fewest(block))
    return float(np.mean(found)), max(found)


def test_covers_are_near_the_fewest_rows_and_a_cover_in_the_wrong_order_is_not() -> None:
    for order, mean, most in (("priority", 1.05, 1.5), ("star", 1.02, 1.3)):
        assert np.all(np.array(ratios(order)) <= (mean, most))
    assert ratios("wrong")[0] > 1.3
