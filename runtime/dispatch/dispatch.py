"""Protocol of a dispatch model, a row of the registry that `parallelize` calls.

Legend: B samples of this rank; S positions; T tokens of these, padding left out; V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import UsageError
from ..coherent.ways import Coherent, Resident
from ..engine.traffic import Traffic
from ..models.huggingface import view
from ..models.protocols import LanguageModel
from ..plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tokens of this rank's samples, int64 `[B, S]`."""

    tokens: Tensor
    samples: Tensor  #: Global sample ids, int64 `[B]`
    #: True, or 1, at tokens, which count their positions from 0; padding is left out, and its logits are 0. None: there
    #: is none.
    mask: Tensor | None = None

    @property
    def real(self) -> Tensor:
        """Mask of the positions that hold a token, not padding, bool `[B, S]`."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.mask is None else self.mask.bool()


@dataclass(frozen=True, slots=True, eq=False)
class Forwarded:
    """The result of a forward on this rank."""

    logits: Tensor  #: `[B, S, V]`; of the samples that ended here where they move
    tokens: Tensor | int  #: The number of these, padding left out
    traffic: Traffic | None = None  #: What this rank sent; None: what its routed blocks say
    #: The most bytes of keys and values held at once; None where the model keeps its own
    cache_bytes: int | None = None


class Dispatch(Protocol):
    """The travel of tokens in one spread model; made by `of` before the model is changed."""

    @classmethod
    def of(cls, plan: Plan, folder: Path | None) -> Self:
        """The dispatch that carries a plan out, whose files lie in `folder`.

        Raises
        ------
        UsageError
            The plan decides what this dispatch model cannot carry out, or lacks what it needs.
        InputError
            A file that the plan names is missing or another.
        """
        ...

    def forward(self, model: nn.Module, batch: Batch, group: dist.ProcessGroup | None) -> Forwarded:
        """The forward of a model whose routed blocks have `ParallelExperts`; all ranks call it together."""
        ...

    def call(self, model: nn.Module, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> Any:
        """Output of the model for inputs of its own; a UsageError where its layers are not called by it."""
        ...

    def follow(self, rows: Tensor) -> Tensor:
        """Rows of the samples of the last forward, `[B, ...]`, where the logits are."""
        ...

    def generation(self, group: dist.ProcessGroup | None) -> Coherent | Resident:
        """The way of tokens through a generation; a UsageError where there is none."""
        ...


def refuse_inputs(inputs: Mapping[str, Any], how: str) -> NoReturn:
    """Refuse a model's own inputs, by name, under a dispatch that takes the model apart: `how`."""
    raise UsageError(
        f"{', '.join(inputs)} under {how}, which takes the model's layers apart and gives logits alone; call"
        " model(tokens, samples, mask), or parallelize with dispatch='standard'"
    )


def padded(logits_TV: Tensor, real_BS: Tensor) -> Tensor:
    """Logits `[B, S, V]`, 0 where there is padding."""
    if len(logits_TV) == real_BS.numel():
        return logits_TV.view(*real_BS.shape, logits_TV.shape[1])
    logits_BSV = logits_TV.new_zeros(*real_BS.shape, logits_TV.shape[1])
    logits_BSV[real_BS] = logits_TV
    return logits_BSV


def view_of_whole(model: nn.Module, how: str) -> LanguageModel:
    """The model in parts, which `how` uses without calling the layers.

    Raises
    ------
    UsageError
        The model is of a family that has no view, or FSDP2 keeps its parameters in parts.
    """
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise UsageError(
            f"{how} of a model of which fully_shard keeps parameters in parts: layers are not called, so that none"
            " would be gathered; fully_shard the whole model only, and make `generate` known by"
            " register_fsdp_forward_method"
        )
    return view(model)
