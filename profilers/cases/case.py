"""Case: one thing to measure, which the harness runs on every rank."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from ..measurement import Size
from ..world import World

__all__ = ["Case"]


class Case(Protocol):
    """One thing to measure; picklable."""

    @property
    def name(self) -> str:
        """The key of the case in a profile."""

    @property
    def unit(self) -> Literal["bytes", "macs"]:
        """Unit of `work`: bytes, or multiply-adds ("macs")."""

    @property
    def min_ranks(self) -> int:
        """The smallest world in which the case means something; 1: each rank works alone."""

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
