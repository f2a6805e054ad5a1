"""What replacing one placement by another takes."""

from dataclasses import dataclass
from typing import Self

from ..solvers.moves import experts_moved
from ..solvers.placement import Placement
from ..traces.model import ModelSpec
from .expert_bytes import expert_bytes

__all__ = ["Moves"]


@dataclass(frozen=True, slots=True)
class Moves:
    """The moves from one placement to another: experts that devices are sent, of all held, and their bytes.

    `num_bytes` is None where the sizes of the model are not known.
    """

    experts: int
    held: int
    num_bytes: int | None

    @classmethod
    def between(cls, old: Placement, new: Placement, model: ModelSpec) -> Self:
        """Those from an old placement to a new one."""
        moved, one = int(experts_moved(new, old).sum()), expert_bytes(model)
        return cls(moved, new.num_slots * new.num_layers, None if one is None else moved * one)
