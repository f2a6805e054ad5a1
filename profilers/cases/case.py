"""Cases: one thing to measure each, which the harness runs on every rank, and the sizes it is measured at."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, Protocol

from ..measurement import Size
from ..world import World

SMALLEST_BYTES = 2**10
QUICK_BYTES, CPU_BYTES, CUDA_BYTES = 2**22, 2**26, 2**30  # the largest buffer of a rank
QUICK_OCTAVES, OCTAVES = 3, 2  # between one size and the next
ALIGNMENT = 16  # bytes of a rank's block: whole elements of every dtype, whole loads of a GPU


class Case(Protocol):
    """A case to measure; picklable."""

    name: str  #: The key of the case in a profile
    unit: Literal["bytes", "macs"]  #: Unit of `work`: bytes, or multiply-adds ("macs")
    min_ranks: int  #: The smallest world in which the case means something; 1: each rank works alone
    #: The axis over which whole curves are measured, whose law is no function of work: the fit goes through them
    curve: str | None = None

    def dtypes(self, device: str) -> Sequence[str]:
        """The dtypes to measure it in on "cpu" or "cuda:i", most wanted first."""

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """The grid, small to large; the same on all ranks. Sizes of a pair of ranks name it (`PAIR`)."""

    def work(self, size: Size, num_ranks: int) -> int:
        """Units of work of one rank in one call."""

    def prepare(self, size: Size, dtype: str, world: World) -> Any:
        """Inputs and output buffers of a rank, on its device; the buffers hold no right answer."""

    def run(self, inputs: Any) -> Any:
        """The call that is timed."""

    def check(self, inputs: Any, output: Any, world: World) -> str | None:
        """Describe the error in an output. None where it is right."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Combinations of the axes' values."""

    axes: Mapping[str, Sequence[int]]  #: Name to values, rising
    most: int  #: The work of the largest size

    def sizes(self, work: Callable[[Size, int], int], *, halved: bool = False) -> list[Size]:
        """The sizes, least work first.

        Parameters
        ----------
        halved
            Of the combinations of all axes but the first, every other one only, as on a chessboard: every two of these
            axes still meet in all their values, and each combination has a whole curve over the first axis.
        """
        points = product(*map(enumerate, self.axes.values()))
        kept = [point for point in points if not halved or sum(index for index, _ in point[1:]) % 2 == 0]
        sizes = [dict(zip(self.axes, (value for _, value in point), strict=True)) for point in kept]
        return sorted((size for size in sizes if work(size, 1) <= self.most), key=lambda size: work(size, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grids:
    """The grids of a case that each rank runs alone."""

    quick_cpu: Grid
    cpu: Grid
    quick_cuda: Grid
    cuda: Grid


class Alone(Case):
    """A case that each rank runs by itself, every rank at the same time."""

    min_ranks = 1
    grids: Grids
    halved = False

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """The grid of this device."""
        cpu, cuda = (self.grids.quick_cpu, self.grids.quick_cuda) if quick else (self.grids.cpu, self.grids.cuda)
        return (cpu if world.device == "cpu" else cuda).sizes(self.work, halved=self.halved)


class Collective(Case):
    """A case of several ranks, over the bytes of a rank's buffer."""

    unit = "bytes"
    min_ranks = 2

    def dtypes(self, device: str) -> Sequence[str]:
        """Bytes of any element."""
        return ("uint8",)

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """Bytes of the buffer."""
        return [{"bytes": count} for count in buffer_sizes(world, quick=quick)]

    def work(self, size: Size, num_ranks: int) -> int:
        """Bytes of all blocks of a rank's buffer but one."""
        return size["bytes"] // num_ranks * (num_ranks - 1)


def buffer_sizes(world: World, *, quick: bool) -> list[int]:
    """Bytes of a collective's buffer, rising from 1 KiB; each a whole number of aligned blocks, one a rank."""
    largest = QUICK_BYTES if quick else CPU_BYTES if world.device == "cpu" else CUDA_BYTES
    octaves = range(0, (largest // SMALLEST_BYTES).bit_length(), QUICK_OCTAVES if quick else OCTAVES)
    block = world.size * ALIGNMENT
    return sorted({max(1, (SMALLEST_BYTES << octave) // block) * block for octave in octaves})
