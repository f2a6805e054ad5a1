"""Coherent dispatch (ExFlow), for inference: a token lives at its highest-weight expert, and attention comes to it.

Legend: B samples of this rank; S positions; G tokens of all ranks; T tokens that this rank holds; V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import UsageError
from ..coherent.attention import attend_contexts
from ..coherent.contexts import Held
from ..coherent.ways import Coherent
from ..models.protocols import LanguageModel
from ..plan import Plan
from .dispatch import Batch, Forwarded, padded, refuse_inputs, view_of_whole


@dataclass(frozen=True, slots=True)
class CoherentDispatch:
    """Attention comes to the tokens: every rank holds the keys and values of all samples."""

    devices_per_node: int

    @classmethod
    def of(cls, plan: Plan, _folder: Path | None) -> Self:
        """The dispatch of a plan whose decisions all go with it."""
        if beside := [decision.key for decision in plan.decisions.made if "coherent" not in decision.dispatch_models]:
            raise UsageError(
                f"{' and '.join(beside)} beside coherent dispatch, which knows of neither; take one of them"
            )
        return cls(plan.cluster.devices_per_node)

    def forward(self, model: nn.Module, batch: Batch, group: dist.ProcessGroup | None) -> Forwarded:
        """Logits `[B, S, V]` of this rank's samples, without gradients."""
        if model.training and torch.is_grad_enabled():
            raise UsageError(
                "dispatch model 'coherent' in training; it is for inference only: call eval(), or parallelize with"
                " dispatch='standard'"
            )
        return _forward(view_of_whole(model, "coherent dispatch"), batch, self.generation(group))

    def call(self, _model: nn.Module, _args: tuple[Any, ...], inputs: Mapping[str, Any]) -> NoReturn:
        """Refuse: the model itself is not called."""
        refuse_inputs(inputs, "coherent dispatch")

    def follow(self, rows: Tensor) -> Tensor:
        """The rows as they are: logits return to where their sample started."""
        return rows

    def generation(self, group: dist.ProcessGroup | None) -> Coherent:
        """Tokens stay where their first expert is, in each step anew."""
        return Coherent(group, devices_per_node=self.devices_per_node)


@torch.no_grad()
def _forward(model: LanguageModel, batch: Batch, way: Coherent) -> Forwarded:
    real_BS, cache_bytes = batch.real, 0
    contexts = way.contexts(batch.samples, real_BS.sum(dim=1))
    held = Held(model.embed(batch.tokens[real_BS]), contexts.own())
    for layer in model.layers:
        q, kv_T2 = held.projected(layer, contexts)
        kv_G2 = way.shared(kv_T2, held)
        held = way.through(layer, attend_contexts(layer.attention, q, kv_G2, held, contexts), contexts)
        cache_bytes = max(cache_bytes, kv_G2.numel() * kv_G2.element_size())
    logits_TV = model.head(model.norm(way.home(held, contexts.source[held.token]).x))
    return Forwarded(padded(logits_TV, real_BS), len(logits_TV), way.traffic, cache_bytes)
