"""The tokens of a forward pass, read from the arguments of the model: which are padding, where each stands.

Legend: B rows; S columns; T = B S tokens, row by row.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Pass:
    """Tokens of a forward pass, as the arguments of the model give them."""

    #: rows, columns: B and S
    rows: int
    columns: int
    num_cached: int  #: Tokens of each row whose keys and values are there from earlier passes
    mask: "Tensor | None"
    position_ids: "Tensor | None"

    def positions(self) -> NDArray[np.int32]:
        """The position of each token in its sample, int32 `[B, S]`; -1: padding.

        Notes
        -----
        A mask counts, padding on whichever side; without one, `position_ids` (which restart where a row packs several
        samples), else the columns after what is cached.
        """
        shape = self.rows, self.columns
        if self.mask is not None:
            real_BC = self.mask.cpu().numpy() != 0
            position_BC = np.where(real_BC, real_BC.cumsum(1) - 1, -1)
            return position_BC[:, -self.columns :].astype(np.int32)
        if self.position_ids is not None:
            return np.broadcast_to(self.position_ids.cpu().numpy(), shape).astype(np.int32)
        return np.broadcast_to(np.arange(self.columns, dtype=np.int32) + self.num_cached, shape)


def pass_of(model: "nn.Module", args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Pass:
    """The pass that a call of `model` starts; its tokens: `input_ids`, `inputs_embeds` or its first tensor, `[B, S]`.

    Raises InputError where it is called with no tensor of tokens.
    """
    import torch

    given = _arguments(model, args, kwargs)
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and value.ndim}
    shown = [tensors[name] for name in ("input_ids", "inputs_embeds") if name in tensors] or list(tensors.values())
    if not shown:
        raise InputError(f"{type(model).__name__} is called without a tensor of tokens; expected one [B, S]")
    rows, columns = shown[0].shape[:2] if shown[0].ndim > 1 else (1, len(shown[0]))
    cached = int(getattr(given.get("past_key_values"), "get_seq_length", int)())
    mask, position_ids = tensors.get("attention_mask"), tensors.get("position_ids")
    if mask is not None and (mask.ndim != 2 or len(mask) != rows or mask.shape[1] < columns):
        mask = None  # of pairs of tokens: it does not say which are padding
    if position_ids is not None and tuple(position_ids.shape) not in ((rows, columns), (1, columns)):
        position_ids = None
    return Pass(rows, columns, cached, mask, position_ids)


def _arguments(model: "nn.Module", args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, those of the model inside a wrapper for data parallelism."""
    forward = getattr(model, "module", model).forward
    try:
        arguments = inspect.signature(forward).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return dict(kwargs)  # the model refuses them itself
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, dict):
            flat |= value
        elif isinstance(value, tuple):
            flat |= {f"{name}{index}": item for index, item in enumerate(value)}
        else:
            flat[name] = value
    return flat
