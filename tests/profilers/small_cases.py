"""The shipped cases on tiny grids, and one that goes wrong on purpose; importable by the ranks of a test."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeplan.profilers.cases.all_to_all import AllToAll, Blocks
from moeplan.profilers.cases.gemm import Gemm
from moeplan.profilers.measurement import Size
from moeplan.profilers.world import World

if TYPE_CHECKING:
    from torch import Tensor


class SmallGemm(Gemm):
    """GEMM on three sizes."""

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:  # noqa: ARG002
        return [{"m": m, "n": 32, "k": 32} for m in (8, 64, 512)]


class SmallAllToAll(AllToAll):
    """All-to-all on four sizes."""

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:  # noqa: ARG002
        return [{"bytes_per_pair": 4**power} for power in (3, 5, 7, 9)]


class Misdelivering(SmallAllToAll):
    """An all-to-all that changes a byte of the larger sizes; for a world of one rank."""

    def work(self, size: Size, num_ranks: int) -> int:
        return super().work(size, num_ranks + 1)

    def run(self, inputs: Blocks) -> "Tensor":
        output = super().run(inputs)
        if output.numel() >= 4**7:
            output[4] ^= 1
        return output
