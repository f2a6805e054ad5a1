"""The collective cases on real ranks, and on groups of some of them: right answers pass, wrong ones do not."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from moeplan.profilers.cases import CASES
from moeplan.profilers.cases.point_to_point import ALL_PAIRS, pairs
from moeplan.profilers.measurement import Size
from moeplan.profilers.world import World, run_world
from tests.builders import known

SIZES: dict[str, Size] = {
    "all_to_all": {"bytes": 3840},
    "uneven_all_to_all": {"bytes": 5000, "sigma_percent": 100},
    "all_gather": {"bytes": 3840},
    "all_reduce": {"bytes": 3840},
    "reduce_scatter": {"bytes": 3840},
    "point_to_point": {"bytes": 777, "first": 0, "second": 1},
}
PLACES = ("result", "received")  # of the output among the inputs: the last that there is


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What one rank's check said; `corrupted` by the kind of damage."""

    case: str
    dtype: str
    size: int
    never_run: str | None
    right: str | None
    after_repeats: str | None
    corrupted: dict[str, str | None]


def verdicts(world: World, _payload: None) -> list[Verdicts]:
    """The checks of every collective on all ranks, and on the odd and the even ones apart."""
    found = list(_in_world(world))
    sides = [[rank for rank in range(world.size) if rank % 2 == odd] for odd in (0, 1)]
    groups = [dist.new_group(side) for side in sides]
    mine, group = sides[world.rank % 2], groups[world.rank % 2]
    inside = dataclasses.replace(
        world, rank=mine.index(world.rank), size=len(mine), hosts=world.hosts[: len(mine)], group=group
    )
    return [*found, *_in_world(inside)]


def _in_world(world: World) -> Iterator[Verdicts]:
    for name, size in SIZES.items():
        if name == "point_to_point" and world.group is not None:
            continue
        for dtype in CASES[name].dtypes("cpu"):
            yield _verdicts(world, name, dtype, size)


def _verdicts(world: World, name: str, dtype: str, size: Size) -> Verdicts:
    case = CASES[name]
    inputs = case.prepare(size, dtype, world)
    never_run = case.check(inputs, _output(inputs), world)
    right = case.check(inputs, case.run(inputs), world)
    for _ in range(3):
        output = case.run(inputs)
    after_repeats = case.check(inputs, output, world)
    corrupted = {kind: case.check(inputs, wrong, world) for kind, wrong in _corruptions(output)}
    return Verdicts(name, dtype, world.size, never_run, right, after_repeats, corrupted)


def _output(inputs: Any) -> Any:
    found = [getattr(inputs, place) for place in PLACES if hasattr(inputs, place)]
    return found[-1] if found else None


def _corruptions(output: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    if output is None:
        return
    for kind, position in (("first element", 0), ("last element", -1)):
        wrong = output.clone()
        wrong[position] += 1
        yield kind, wrong
    yield "shifted", output.roll(1)
    yield "halves swapped", output.roll(len(output) // 2)


NUM_RANKS = 5  # sides of 3 and 2
WAITING = 3  # ranks without a part in the point-to-point


@pytest.fixture(scope="module")
def by_rank() -> list[list[Verdicts]]:
    return known(run_world(NUM_RANKS, verdicts))


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
