"""Standard dispatch as generation goes through it: tokens live where their sample started, and return to it.

Legend: B samples of this rank; T tokens.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.layer import ParallelExperts
from ..engine.traffic import Traffic
from ..models.protocols import Layer
from .contexts import Contexts
from .held import Held

__all__ = ["Resident"]


class Resident:
    """The way of tokens between attentions where a rank holds the keys and values of its own samples only.

    Attributes
    ----------
    traffic
        What it took so far.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.traffic = group, Traffic()

    def contexts(self, sample_B: Tensor, length_B: Tensor) -> Contexts:
        """The samples whose keys and values this rank holds: its own."""
        return Contexts.of(sample_B, length_B, torch.full_like(sample_B, dist.get_rank(self.group)), self.group)

    def shared(self, kv_T2: Tensor, _held: Held) -> Tensor:
        """The keys and values as they are."""
        return kv_T2

    def through(self, layer: Layer, held: Held, contexts: Contexts) -> Held:
        """Tokens after a layer's block, on the ranks where they were."""
        experts = getattr(layer.moe, "experts", None)
        if isinstance(experts, ParallelExperts):
            experts.begin(contexts.sample[held.token], contexts.position[held.token])
        y_TM = layer.moe(layer.moe_norm(held.x))
        if isinstance(experts, ParallelExperts):
            self.traffic = self.traffic + experts.traffic
        return Held(held.x + y_TM, held.token)
