"""Weight of experts, and the moves that replace one placement by another."""

from dataclasses import dataclass
from typing import Self

from ..solvers.moves import experts_moved
from ..solvers.placement import Placement
from ..traces.model import ModelSpec

__all__ = ["MATRICES", "Moves", "expert_bytes"]

MATRICES = 3  # of an expert, each hidden x ffn: gate, up and down


def expert_bytes(model: ModelSpec) -> int | None:
    """Bytes of an expert's weights, in elements of the model's dtype; None where a size is not known."""
    if model.ffn_size is None or model.copy_bytes is None:
        return None
    return MATRICES * model.ffn_size * model.copy_bytes


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
        """Moves from an old placement to a new one."""
        moved, one = int(experts_moved(new, old).sum()), expert_bytes(model)
        return cls(moved, new.num_slots * new.num_layers, None if one is None else moved * one)
