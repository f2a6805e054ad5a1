"""Coherent dispatch (ExFlow): a token stays where its highest-weight expert is; for inference."""

from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import UsageError
from ..coherent.forward import Coherent, coherent_forward
from ..plan import Plan
from .dispatch import Forwarded, view_of_whole

__all__ = ["CoherentDispatch"]


class CoherentDispatch:
    """Attention comes to the tokens: every rank holds the keys and values of all samples."""

    @classmethod
    def of(cls, plan: Plan, _folder: Path | None) -> Self:
        """The dispatch of a plan whose decisions all go with it."""
        if beside := [made.key for made in plan.decisions.made if "coherent" not in made.dispatch_models]:
            raise UsageError(
                f"{' and '.join(beside)} beside coherent dispatch, which knows of neither; take one of them"
            )
        return cls()

    def forward(
        self,
        model: nn.Module,
        tokens_BS: Tensor,
        sample_B: Tensor,
        mask_BS: Tensor | None,
        group: dist.ProcessGroup | None,
    ) -> Forwarded:
        """Logits `[B, S, V]` of this rank's samples, without gradients."""
        if model.training and torch.is_grad_enabled():
            raise UsageError(
                "dispatch model 'coherent' in training; it is for inference only: call eval(), or parallelize with"
                " dispatch='standard'"
            )
        done = coherent_forward(view_of_whole(model, "coherent dispatch"), tokens_BS, sample_B, group, mask_BS=mask_BS)
        return Forwarded(done.logits, done.traffic, done.cache_bytes)

    def follow(self, rows: Tensor) -> Tensor:
        """The rows as they are: logits return to where their sample started."""
        return rows

    def generation(self, group: dist.ProcessGroup | None) -> Coherent:
        """Tokens stay where their first expert is, in each step anew."""
        return Coherent(group)
