"""Standard dispatch: tokens return to the rank of their sample after each layer."""

from pathlib import Path
from typing import Self

import torch.distributed as dist
from torch import Tensor, nn

from ..coherent.ways import Resident
from ..plan import Plan
from .dispatch import Forwarded

__all__ = ["StandardDispatch"]


class StandardDispatch:
    """The model is called as it is; its routed blocks do the rest."""

    @classmethod
    def of(cls, _plan: Plan, _folder: Path | None) -> Self:
        """The dispatch of any plan; what moves samples is left out."""
        return cls()

    def forward(
        self,
        model: nn.Module,
        tokens_BS: Tensor,
        _sample_B: Tensor,
        mask_BS: Tensor | None,
        _group: dist.ProcessGroup | None,
    ) -> Forwarded:
        """Logits `[B, S, V]` of this rank's samples."""
        output = model(tokens_BS) if mask_BS is None else model(tokens_BS, attention_mask=mask_BS)
        return Forwarded(getattr(output, "logits", output))

    def follow(self, rows: Tensor) -> Tensor:
        """The rows as they are: samples stay."""
        return rows

    def generation(self, group: dist.ProcessGroup | None) -> Resident:
        """Tokens return to the rank that holds their sample's keys and values."""
        return Resident(group)
