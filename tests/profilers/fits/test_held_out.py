"""Which sizes are held out, and how their errors are told."""

import numpy as np
import pytest

from moeplan.errors import InputError
from moeplan.profilers.fits.fit import HeldOut
from moeplan.profilers.fits.sizes import Sizes, distinct, folds


def sizes(**axes: list[int]) -> Sizes:
    points = np.array(list(axes.values())).T
    works = points.prod(axis=1).astype(float)
    return Sizes(tuple(axes), points, works, works)


@pytest.mark.parametrize("count", range(1, 10))
def test_along_one_axis_every_inner_size_is_held_out_once_and_the_ends_never(count: int) -> None:
    held = folds(sizes(bytes=[2**power for power in range(count)]))
    times = np.sum(held, axis=0) if held else np.zeros(count)
    assert times.tolist() == [0, *[1] * (count - 2), 0][:count] if count > 1 else times.tolist() == [0]
    for unseen in held:
        assert not (unseen[1:] & unseen[:-1]).any()


def test_all_m_of_an_n_and_k_are_held_out_together_and_each_once() -> None:
    grid = [(m, n, k) for n in (2, 4, 8) for k in (3, 9, 27) for m in (1, 2, 3, 4, 5)]
    m, n, k = (list(column) for column in zip(*grid, strict=True))
    held = folds(sizes(n=n, m=m, k=k))
    assert len(held) == 5
    assert (np.sum(held, axis=0) == 1).all()
    for unseen in held:
        out = {(n[at], k[at]) for at in np.flatnonzero(unseen)}
        assert unseen.tolist() == [(n[at], k[at]) in out for at in range(len(grid))]


def test_with_few_groups_sizes_of_equal_work_are_held_out_together() -> None:
    held = folds(sizes(m=[1, 2, 4, 2, 4, 8], n=[1, 1, 1, 2, 2, 2]))  # works 1, 2, 4, 4, 8, 16
    assert [np.flatnonzero(unseen).tolist() for unseen in held] == [[1, 4], [2, 3]]


def test_the_worst_sizes_come_first_and_no_more_than_32() -> None:
    errors = np.random.default_rng(0).random(100)
    held = HeldOut.of(np.arange(100)[:, None], errors)
    assert held.num_sizes == 100
    assert (held.median_error, held.worst_error) == (np.median(errors), errors.max())
    assert held.p95_error == pytest.approx(np.percentile(errors, 95))
    assert [errors[at] for (at,) in held.sizes] == sorted(errors, reverse=True)[:32] == list(held.errors)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"median_error": 0.3},
        {"p95_error": 0.9},
        {"worst_error": 0.5},
        {"num_sizes": 1},
        {"num_sizes": 0, "sizes": (), "errors": ()},
        {"errors": (0.2,)},
        {"errors": (0.2, 0.3)},
    ],
)
def test_impossible_errors_are_refused(spoilt: dict[str, object]) -> None:
    good: dict[str, object] = {"num_sizes": 2, "median_error": 0.1, "p95_error": 0.2, "worst_error": 0.2}
    good |= {"sizes": ((1,), (2,)), "errors": (0.2, 0.0)}
    HeldOut(**good)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="held-out"):
        HeldOut(**good | spoilt)  # type: ignore[arg-type]


def test_distinct_rows_are_those_of_numpy() -> None:
    rows = np.random.default_rng(0).integers(0, 4, (200, 3))
    oracle, inverse = np.unique(rows, axis=0, return_inverse=True)
    first, place = distinct(list(rows.T))
    assert (rows[first] == oracle).all()
    assert (place == inverse.reshape(-1)).all()


def test_a_size_measured_often_is_one_at_its_median() -> None:
    merged = Sizes.merged({"n": np.array([5, 3, 5, 5, 3])}, np.array([5.0, 3, 5, 5, 3]), np.array([9.0, 1, 2, 4, 3]))
    assert merged.points.tolist() == [[3], [5]]
    assert merged.seconds.tolist() == [2.0, 4.0]
    assert merged.works.tolist() == [3.0, 5.0]
