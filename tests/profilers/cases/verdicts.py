"""What the checks of the collective cases say about right and wrong answers; run by the ranks of a test."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from moeplan.profilers.cases import CASES
from moeplan.profilers.measurement import Size
from moeplan.profilers.world import World

if TYPE_CHECKING:
    from torch import Tensor

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


def _corruptions(output: "Tensor | None") -> Iterator[tuple[str, "Tensor"]]:
    if output is None:
        return
    for kind, position in (("first element", 0), ("last element", -1)):
        wrong = output.clone()
        wrong[position] += 1
        yield kind, wrong
    yield "shifted", output.roll(1)
    yield "halves swapped", output.roll(len(output) // 2)
