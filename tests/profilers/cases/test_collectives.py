"""The collective cases on real ranks, and on groups of some of them: right answers pass, wrong ones do not."""

from itertools import combinations

import pytest

from moeplan.profilers.cases.point_to_point import ALL_PAIRS, pairs
from moeplan.profilers.world import run_world
from tests.profilers.cases.verdicts import SIZES, Verdicts, verdicts

NUM_RANKS = 5  # sides of 3 and 2
WAITING = 3  # ranks without a part in the point-to-point


@pytest.fixture(scope="module")
def by_rank() -> list[list[Verdicts]]:
    found = run_world(NUM_RANKS, verdicts)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def told(by_rank: list[list[Verdicts]]) -> list[Verdicts]:
    """Of the ranks that took part."""
    return [one for rank in by_rank for one in rank if one.corrupted]


def test_every_collective_is_tried_in_every_dtype_and_on_both_kinds_of_group(by_rank: list[list[Verdicts]]) -> None:
    for rank, found in enumerate(by_rank):
        assert {one.case for one in found} == set(SIZES)
        assert {one.size for one in found if one.case != "point_to_point"} == {NUM_RANKS, 2 if rank % 2 else 3}
        for case in ("all_reduce", "reduce_scatter"):
            assert {one.dtype for one in found if one.case == case} == {"fp32", "bf16", "fp16"}


def test_an_exchange_that_ran_is_right_and_stays_right_when_repeated(told: list[Verdicts]) -> None:
    assert not [one for one in told if one.right or one.after_repeats]


def test_an_exchange_that_never_ran_is_a_wrong_answer(told: list[Verdicts]) -> None:
    assert not [one for one in told if not one.never_run]
    assert {one.never_run for one in told if one.case == "point_to_point"} == {
        f"777 of 777 bytes from rank {peer} differ" for peer in (0, 1)
    }


def test_one_wrong_element_and_elements_in_wrong_places_are_wrong_answers(told: list[Verdicts]) -> None:
    for one in told:
        assert all(one.corrupted.values()), one
        for kind in ("first element", "last element"):
            assert str(one.corrupted[kind]).startswith("1 of "), one


def test_ranks_outside_a_pair_wait_and_have_nothing_to_say(by_rank: list[list[Verdicts]]) -> None:
    silent = [(rank, one) for rank, found in enumerate(by_rank) for one in found if not one.corrupted]
    assert [rank for rank, _ in silent] == [2, 3, 4]
    assert not [one for _, one in silent if one.case != "point_to_point" or one.never_run or one.right]


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_all_pairs_of_up_to_sixteen_ranks_are_measured(num_ranks: int) -> None:
    assert pairs(num_ranks) == list(combinations(range(num_ranks), 2))


@pytest.mark.parametrize("num_ranks", [17, 64, 100, 512, 4096])
def test_of_many_ranks_some_pairs_of_every_distance_are_measured(num_ranks: int) -> None:
    found = pairs(num_ranks)
    assert len(set(found)) == len(found) <= 2 * ALL_PAIRS
    assert all(0 <= first < second < num_ranks for first, second in found)
    inside = [pair for pair in found if pair[0] // 8 == pair[1] // 8]
    assert len(inside) >= 16
    assert len(found) - len(inside) >= 16
    assert max(second for _, second in found) >= num_ranks - num_ranks // 8
