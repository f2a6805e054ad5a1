"""Standard dispatch: tokens return to the rank of their sample after each layer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor, nn

from ..coherent.ways import Resident
from ..plan import Plan
from .dispatch import Batch, Forwarded


class StandardDispatch:
    """The model is called as it is; its routed blocks do the rest."""

    @classmethod
    def of(cls, _plan: Plan, _folder: Path | None) -> Self:
        """The standard dispatch of any plan; moves of samples are left out."""
        return cls()

    def forward(self, model: nn.Module, batch: Batch, _group: dist.ProcessGroup | None) -> Forwarded:
        """Logits `[B, S, V]` of this rank's samples."""
        output = model(batch.tokens) if batch.mask is None else model(batch.tokens, attention_mask=batch.mask)
        return Forwarded(getattr(output, "logits", output), batch.real.sum())

    def call(self, model: nn.Module, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> Any:
        """The model's own return value, unchanged."""
        return model(*args, **inputs)

    def follow(self, rows: Tensor) -> Tensor:
        """The rows as they are: samples stay."""
        return rows

    def generation(self, group: dist.ProcessGroup | None) -> Resident:
        """Tokens return to the rank that holds their sample's keys and values."""
        return Resident(group)
