"""Grids: the sizes a case is measured at, along its axes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ..measurement import Size
from ..world import World

__all__ = ["Grid", "Grids", "buffer_sizes"]

SMALLEST_BYTES = 2**10
QUICK_BYTES, CPU_BYTES, CUDA_BYTES = 2**22, 2**26, 2**30  # the largest buffer of a rank
QUICK_OCTAVES, OCTAVES = 3, 2  # between one size and the next
ALIGNMENT = 16  # bytes of a rank's block: whole elements of every dtype, whole loads of a GPU


@dataclass(frozen=True, slots=True)
class Grid:
    """Combinations of the axes' values.

    Parameters
    ----------
    axes
        Name to values, rising.
    most
        The work of the largest size.
    halved
        Of the combinations of all axes but the first, every other one only, as on a chessboard: every two of these axes
        still meet in all their values, and each combination has a whole curve over the first axis.
    """

    axes: Mapping[str, Sequence[int]]
    most: int
    halved: bool = False

    def sizes(self, work: Callable[[Size, int], int]) -> list[Size]:
        """The sizes, least work first."""
        points = product(*map(enumerate, self.axes.values()))
        kept = [point for point in points if not self.halved or sum(index for index, _ in point[1:]) % 2 == 0]
        sizes = [dict(zip(self.axes, (value for _, value in point), strict=True)) for point in kept]
        return sorted((size for size in sizes if work(size, 1) <= self.most), key=lambda size: work(size, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grids:
    """The grids of a case that each rank runs alone."""

    quick_cpu: Grid
    cpu: Grid
    quick_cuda: Grid
    cuda: Grid

    def sizes(self, world: World, work: Callable[[Size, int], int], *, quick: bool) -> list[Size]:
        """Sizes of the grid for this device."""
        if world.device == "cpu":
            return (self.quick_cpu if quick else self.cpu).sizes(work)
        return (self.quick_cuda if quick else self.cuda).sizes(work)


def buffer_sizes(world: World, *, quick: bool) -> list[int]:
    """Bytes of a collective's buffer, rising from 1 KiB; each a whole number of aligned blocks, one a rank."""
    largest = QUICK_BYTES if quick else CPU_BYTES if world.device == "cpu" else CUDA_BYTES
    octaves = range(0, (largest // SMALLEST_BYTES).bit_length(), QUICK_OCTAVES if quick else OCTAVES)
    block = world.size * ALIGNMENT
    return sorted({max(1, (SMALLEST_BYTES << octave) // block) * block for octave in octaves})
