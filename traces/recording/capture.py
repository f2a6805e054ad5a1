"""A capture of the routing that MoE layers show in one forward pass, moved off the device once.

Legend: T tokens; R tokens kept; L MoE layers; E experts; K experts per token; M hidden size.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..model import ModelSpec
from .layers import MoELayer

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Cells:
    """The routing of the kept tokens."""

    ids: NDArray[np.uint16]  #: uint16 `[R, L, K]`, largest gate weight first, 65535 = not routed
    weights: NDArray[np.float16] | None  #: float16 `[R, L, K]`, or None
    inputs: dict[int, NDArray[np.float16]]  #: Layer -> float16 `[R, M]`, what entered it


class Capture:
    """Hooks on MoE layers; they do nothing outside a pass.

    Parameters
    ----------
    embeddings
        Layers whose inputs are kept too.
    """

    def __init__(self, layers: Sequence[MoELayer], spec: ModelSpec, embeddings: Collection[int] = ()) -> None:
        self._layers = layers
        self._spec = spec
        self._embeddings = frozenset(embeddings)
        self._handles: list[Any] = []
        self._seen: dict[int, tuple[Tensor, Tensor | None]] | None = None
        self._inputs: dict[int, Tensor] = {}

    def attach(self) -> None:
        """Hook every layer."""
        for ordinal, layer in enumerate(self._layers):
            hook = partial(self._called if layer.at_input else self._returned, ordinal)
            attach = layer.module.register_forward_pre_hook if layer.at_input else layer.module.register_forward_hook
            self._handles.append(attach(hook, with_kwargs=True))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def start(self) -> None:
        """Begin a pass; what an unfinished one showed is forgotten."""
        self._seen, self._inputs = {}, {}

    def stop(self) -> None:
        """End a pass and forget what it showed."""
        self._seen, self._inputs = None, {}

    def take(self, num_tokens: int, rows: NDArray[np.int64] | None, *, weights: bool) -> Cells:
        """End the pass and return what it showed of these rows (None: all).

        Raises InputError where a layer did not run, showed another number of tokens, ids that are none, or no weights
        where they are wanted.
        """
        import torch

        seen, inputs = self._seen, self._inputs
        self.stop()
        with torch.no_grad():
            ids_LRK, gates_LRK = self._stacked(seen or {}, num_tokens, rows, weights)
            ids = ids_LRK.to(torch.int16).cpu().numpy().view(np.uint16).transpose(1, 0, 2)
            gates = gates_LRK.half().cpu().numpy().transpose(1, 0, 2) if weights and gates_LRK is not None else None
            return Cells(ids, gates, {layer: _of_rows(x, rows, 0).cpu().numpy() for layer, x in inputs.items()})

    def _called(self, ordinal: int, module: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        if self._seen is not None:
            values = (*args, *kwargs.values())
            self._show(ordinal, values, values[1:])

    def _returned(
        self, ordinal: int, module: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        del module
        if self._seen is not None:
            self._show(ordinal, (*args, *kwargs.values()), output if isinstance(output, (tuple, list)) else (output,))

    def _show(self, ordinal: int, arguments: Sequence[Any], values: Sequence[Any]) -> None:
        assert self._seen is not None
        name = self._layers[ordinal].name
        if ordinal in self._seen:
            raise InputError(f"router {name} ran twice in a pass; record one forward pass at a time")
        self._seen[ordinal] = _routing(values, self._spec.num_experts, self._spec.top_k, name)
        if ordinal in self._embeddings:
            self._inputs[ordinal] = _half_copy(arguments, len(self._seen[ordinal][0]), name)

    def _stacked(
        self, seen: dict[int, tuple["Tensor", "Tensor | None"]], num_tokens: int, rows: Any, weights: bool
    ) -> tuple["Tensor", "Tensor | None"]:
        """Ids and, where every layer shows them, gates `[L, R, K]` by descending gate, checked."""
        self._check_complete(seen, num_tokens)
        shown = [seen[ordinal] for ordinal in range(len(self._layers))]
        ids_LRK = _of_rows(_stack([ids for ids, _ in shown]), rows, 1)
        gates = [weights for _, weights in shown if weights is not None]
        gates_LRK = _of_rows(_stack(gates), rows, 1) if len(gates) == len(shown) else None
        if gates_LRK is not None and not bool((gates_LRK[..., 1:] <= gates_LRK[..., :-1]).all()):
            self._check_finite(gates_LRK)
            gates_LRK, order = gates_LRK.sort(dim=-1, descending=True, stable=True)
            ids_LRK = ids_LRK.gather(-1, order)
        self._check_ids(ids_LRK)
        if weights and gates_LRK is None:
            name = next(self._layers[ordinal].name for ordinal, (_, gates) in enumerate(shown) if gates is None)
            raise InputError(f"router {name} gives no gate weights; record without them")
        return ids_LRK, gates_LRK

    def _check_complete(self, seen: dict[int, tuple[Any, Any]], num_tokens: int) -> None:
        for ordinal, layer in enumerate(self._layers):
            if ordinal not in seen:
                raise InputError(f"router {layer.name} did not run in the pass; expected every router to run once")
            if len(ids := seen[ordinal][0]) != num_tokens:
                raise InputError(f"router {layer.name} gave {len(ids)} tokens; positions were given for {num_tokens}")

    def _check_finite(self, gates_LRK: "Tensor") -> None:
        finite_L = gates_LRK.isfinite().flatten(1).all(1).tolist()
        if not all(finite_L):
            name = self._layers[finite_L.index(False)].name
            raise InputError(f"router {name} gives a gate weight or logit that is not finite; expected numbers")

    def _check_ids(self, ids_LRK: "Tensor") -> None:
        """Refuse ids that uint16 does not hold; -1 becomes 65535, not routed."""
        if not ids_LRK.numel():
            return
        low, high = (int(bound) for bound in ids_LRK.aminmax())
        if low >= -1 and high < self._spec.num_experts:
            return
        for layer, ids_RK in zip(self._layers, ids_LRK, strict=True):
            low, high = (int(bound) for bound in ids_RK.aminmax())
            if low < -1 or high >= self._spec.num_experts:
                raise InputError(
                    f"router {layer.name} gives expert ids {low} to {high}; expected 0 to {self._spec.num_experts - 1},"
                    " or -1 for not routed"
                )


def _routing(values: Iterable[Any], num_experts: int, top_k: int, name: str) -> tuple["Tensor", "Tensor | None"]:
    """Expert ids `[T, K]` and their gate weights, if any, in the order that the module has them.

    `values` are a module's arguments or results: integer ids `[..., K]` and perhaps weights of that shape; or logits
    `[..., E]`, of which the top-k of the softmax is taken.
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


def _stack(tensors: Sequence["Tensor"]) -> "Tensor":
    """`[L, ...]` on the device of the first."""
    import torch

    return torch.stack([tensor.to(tensors[0].device) for tensor in tensors])


def _of_rows(tensor: "Tensor", rows: NDArray[np.int64] | None, dim: int) -> "Tensor":
    import torch

    return tensor if rows is None else tensor.index_select(dim, torch.from_numpy(rows).to(tensor.device))


def _half_copy(arguments: Sequence[Any], num_tokens: int, name: str) -> "Tensor":
    """The first floating argument as float16 `[T, M]`, copied: the model may go on to write into it."""
    import torch

    for value in arguments:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            flat = value.detach().reshape(-1, value.shape[-1])
            if len(flat) == num_tokens:
                return flat.to(torch.float16, copy=True)
    raise InputError(f"router {name} is not called with the hidden states of its tokens; record without embeddings")
