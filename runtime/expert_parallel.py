"""The model that `parallelize` returns: its forward in each dispatch model.

Legend: B samples of this rank; S positions; T tokens; L MoE layers; V vocabulary.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UsageError
from ..traces.schema import RANK_BITS
from .coherent import coherent_forward
from .decisions import DispatchModel
from .huggingface import view
from .layer import ParallelExperts
from .plan import Plan
from .routing import RoutedTokens
from .traffic import Traffic

__all__ = ["ExpertParallelModel"]


class ExpertParallelModel(nn.Module):
    """A model that `parallelize` spread over ranks.

    Attributes
    ----------
    model
        The changed model; under `standard` it may be called itself, wherever the whole one was.
    traffic, routed
        What the last forward sent from this rank, and what it routed here, one item a layer.
    """

    traffic: Traffic
    routed: tuple[RoutedTokens, ...]

    def __init__(self, model: nn.Module, plan: Plan, dispatch: DispatchModel, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.model, self.plan, self.dispatch, self.group = model, plan, dispatch, group
        self._samples: Tensor | None = None
        model.register_forward_pre_hook(self._announce, with_kwargs=True)

    @property
    def blocks(self) -> list[ParallelExperts]:
        """The experts of each MoE layer."""
        return [module for module in self.model.modules() if isinstance(module, ParallelExperts)]

    def forward(self, tokens: Tensor, samples: Tensor | None = None) -> Tensor:
        """Logits `[B, S, V]` of this rank's tokens, int64 `[B, S]`; all ranks call it together, B may be 0.

        Parameters
        ----------
        samples
            Global sample ids, int64 `[B]`, by which replicas take turns; None numbers them `rank << 40 | ordinal`.
        """
        if samples is None:
            samples = self._numbered(len(tokens), tokens.device)
        if self.dispatch == "coherent":
            if self.training and torch.is_grad_enabled():
                raise UsageError(
                    "dispatch model 'coherent' in training; it is for inference only: call eval(), or parallelize with"
                    " dispatch='standard'"
                )
            logits, self.traffic = coherent_forward(view(self.model), tokens, samples, self.group)
        else:
            logits = self._standard(tokens, samples)
        self.routed = tuple(block.routed for block in self.blocks)
        return logits

    def _standard(self, tokens_BS: Tensor, sample_B: Tensor) -> Tensor:
        self._samples = sample_B
        output = self.model(tokens_BS)
        self.traffic = Traffic.total(block.traffic for block in self.blocks)
        return cast("Tensor", getattr(output, "logits", output))

    def _announce(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the experts which tokens the model is called for, by ids `[B, S]` or embeddings `[B, S, M]`."""
        given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        tokens = next((value for value in given if isinstance(value, Tensor)), None)
        if tokens is None or tokens.ndim < 2:
            return
        batch, length = tokens.shape[:2]
        samples, self._samples = self._samples, None
        if samples is None:
            samples = self._numbered(batch, tokens.device)
        position_T = torch.arange(length, device=tokens.device).repeat(batch)
        for block in self.blocks:
            block.begin(samples.repeat_interleave(length), position_T)

    def _numbered(self, batch: int, device: torch.device) -> Tensor:
        """Sample ids of their own for the samples of this rank."""
        return torch.arange(batch, device=device) + (dist.get_rank(self.group) << RANK_BITS)
