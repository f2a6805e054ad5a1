"""What a module shows of the routing of its layer, from its arguments or from what it returns.

Legend: T tokens; E experts; K experts a token.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["routing"]


def routing(values: Iterable[Any], num_experts: int, top_k: int, name: str) -> tuple["Tensor", "Tensor | None"]:
    """Expert ids `[T, K]` and their gate weights, where there are any, as the module has them.

    Parameters
    ----------
    values
        Arguments or results: integer ids `[..., K]` and perhaps weights of that shape; or logits `[..., E]`, of which
        the top-k of the softmax is taken.
    name
        The module's, for the message.

    Raises
    ------
    InputError
        There is neither.
    """
    import torch

    tensors = [value.detach() for value in values if isinstance(value, torch.Tensor) and value.ndim]
    whole = [t for t in tensors if not t.is_floating_point() and t.dtype != torch.bool]
    ids = next((t for t in whole if t.shape[-1] == top_k), None)
    if ids is not None:
        shape = ids.shape
        gates = next((t for t in tensors if t.is_floating_point() and t.shape == shape), None)
        return ids.reshape(-1, top_k), None if gates is None else gates.reshape(-1, top_k)
    logits = next((t for t in tensors if t.is_floating_point() and t.shape[-1] == num_experts), None)
    if logits is None:
        raise InputError(
            f"router {name} gives tensors of shapes {[tuple(t.shape) for t in tensors]}; expected integer ids"
            f" [..., {top_k}] or logits [..., {num_experts}]"
        )
    top = logits.reshape(-1, num_experts).float().softmax(-1).topk(top_k)
    return top.indices, top.values
