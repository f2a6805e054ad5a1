"""The shipped cases on tiny grids, and some that behave as a test wants; importable by the ranks of a test."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

from moeplan.profilers.cases.case import Case
from moeplan.profilers.cases.exchange import AllToAll, Blocks
from moeplan.profilers.cases.gemm import Gemm
from moeplan.profilers.measurement import Size
from moeplan.profilers.stopwatch import lap
from moeplan.profilers.world import World

if TYPE_CHECKING:
    from torch import Tensor


class SmallGemm(Gemm):
    """GEMM in one dtype on three sizes."""

    def dtypes(self, device: str) -> Sequence[str]:
        return ("fp32",)

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        return [{"m": m, "n": 32, "k": 32} for m in (8, 64, 512)]


class SmallAllToAll(AllToAll):
    """All-to-all on four sizes."""

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        return [{"bytes": world.size * 4**power} for power in (3, 5, 7, 9)]


class Misdelivering(SmallAllToAll):
    """An all-to-all that changes a byte of the larger sizes; for a world of one rank."""

    min_ranks = 1

    def work(self, size: Size, num_ranks: int) -> int:
        return size["bytes"]

    def run(self, inputs: Blocks) -> "Tensor":
        output = super().run(inputs)
        if output.numel() >= 4**7:
            output[4] ^= 1
        return output


@dataclass(frozen=True)
class Sleeping(Case):
    """A case of no work that takes a while on every rank, `bytes` microseconds of it."""

    name: str = "gemm"
    unit: Literal["bytes", "macs"] = "macs"
    min_ranks: int = 1
    kinds: tuple[str, ...] = ("fp32",)
    microseconds: tuple[int, ...] = (1000, 2000, 3000)

    def dtypes(self, device: str) -> Sequence[str]:
        return self.kinds

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        return [{"m": count} for count in self.microseconds]

    def work(self, size: Size, num_ranks: int) -> int:
        return size["m"]

    def prepare(self, size: Size, dtype: str, world: World) -> float:
        return size["m"] * 1e-6

    def run(self, inputs: float) -> None:
        time.sleep(inputs)

    def check(self, inputs: float, output: None, world: World) -> str | None:
        return None


class Lapped(Sleeping):
    """A case of two laps as long as it takes alone, between which it does something else for longer."""

    def run(self, inputs: float) -> None:
        with lap("dispatch"):
            time.sleep(inputs)
        time.sleep(20 * inputs)
        with lap("combine"):
            time.sleep(inputs)


class SleepingPairs(Sleeping):
    """A point-to-point that takes eight times as long between even and odd ranks as among either."""

    def __init__(self) -> None:
        super().__init__("point_to_point", "macs", 2)

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        pairs = combinations(range(world.size), 2)
        return [{"bytes": count, "first": one, "second": two} for one, two in pairs for count in (500, 1000)]

    def work(self, size: Size, num_ranks: int) -> int:
        return size["bytes"]

    def prepare(self, size: Size, dtype: str, world: World) -> float:
        return size["bytes"] * 1e-6 * (8 if (size["first"] + size["second"]) % 2 else 1)


def by_halves(rank: int) -> str:
    """Two "nodes" of two ranks, whatever machine runs them."""
    return f"node {rank // 2}"


def interrupted(*_: Any, **__: Any) -> None:
    """A world that Ctrl-C ends at once."""
    raise KeyboardInterrupt
