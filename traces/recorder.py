"""The recorder: hooks on a model's routers that turn its forward passes into a trace. Token ids are never recorded.

Legend: T tokens; L MoE layers; E experts; K experts a token.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, UsageError
from .model import ModelSpec
from .schema import PHASES, RANK_BITS, TokenBatch
from .writer import TraceWriter

if TYPE_CHECKING:
    import torch

__all__ = ["Recorder", "routers", "sample_ids"]


def routers(model: "torch.nn.Module", pattern: str) -> list[tuple[str, "torch.nn.Module"]]:
    """The modules whose whole qualified name matches a regular expression, in the model's own order.

    Raises
    ------
    UsageError
        The pattern is no regular expression or matches no module.
    """
    try:
        found = [(name, module) for name, module in model.named_modules() if re.fullmatch(pattern, name)]
    except re.error as error:
        raise UsageError(
            rf"router pattern {pattern!r} is no regular expression ({error}); expected one such as .*\.mlp\.router"
        ) from error
    if not found:
        some = [name for name, _ in model.named_modules() if re.search("rout|gate", name)][:3]
        raise UsageError(
            f"router pattern {pattern!r} matches no module; names that may be meant: {', '.join(some) or 'none'}"
        )
    return found


def sample_ids(source_rank: int, ordinals: ArrayLike) -> NDArray[np.int64]:
    """Sample ids that ranks need not agree on: `source_rank << 40 | ordinal`, for ordinals counted on each rank."""
    return np.int64(source_rank) << np.int64(RANK_BITS) | np.asarray(ordinals, np.int64)


class Recorder:
    """Forward hooks on the routers of a model, a context manager that removes them at its end.

    A router may give logits `[..., E]` (the top-k of their softmax is recorded), or a tuple that holds expert ids
    `[..., K]` (integers) and perhaps their gate weights `[..., K]` (floats). Layers are numbered in the model's order.

    Parameters
    ----------
    pattern
        A regular expression for the whole qualified names of the routers, e.g. `layers[.][0-9]+[.]moe[.]router`.
    writer
        Takes the tokens; it knows the model and stays open.

    Raises
    ------
    UsageError
        The pattern matches another number of modules than the model has MoE layers.
    """

    def __init__(self, model: "torch.nn.Module", pattern: str, writer: TraceWriter) -> None:
        found = routers(model, pattern)
        self.names = tuple(name for name, _ in found)
        self._modules = [module for _, module in found]
        self._writer = writer
        self._handles: list[Any] = []
        self._outputs: dict[int, Any] | None = None
        if len(found) != self._spec.num_layers:
            raise UsageError(
                f"router pattern {pattern!r} matches {len(found)} modules ({', '.join(self.names[:3])}, ...);"
                f" {self._spec.name} has {self._spec.num_layers} MoE layers"
            )

    @contextmanager
    def tokens(
        self,
        *,
        position: ArrayLike,
        sample: ArrayLike | None = None,
        step: ArrayLike | None = None,
        source_rank: ArrayLike | None = None,
        phase: str = "prefill",
    ) -> Iterator[None]:
        """Record the one forward pass inside the block; the tokens are those of `position`, in the model's order.

        Parameters
        ----------
        position
            Of any shape with T elements.
        sample, step, source_rank
            T elements, or one number for all; None: unknown (see `sample_ids` for several ranks).

        Raises
        ------
        InputError
            A router did not run, ran twice, gave another number of tokens or what is no routing.
        """
        if phase not in PHASES:
            raise UsageError(f"phase {phase!r}; expected {', '.join(PHASES)}")
        self._outputs = {}
        try:
            yield
            outputs = self._outputs
        finally:
            self._outputs = None
        positions = np.asarray(position, np.int32).reshape(-1)
        ids, weights = self._cells(outputs, len(positions))
        self._writer.append(
            TokenBatch(
                step=_column(step, len(positions), np.int32),
                sample=_column(sample, len(positions), np.int64),
                position=positions,
                source_rank=_column(source_rank, len(positions), np.int32),
                phase=np.full(len(positions), PHASES.index(phase), np.int8),
                ids=ids,
                weights=weights,
            )
        )

    def __enter__(self) -> Self:
        for layer, module in enumerate(self._modules):
            self._handles.append(module.register_forward_hook(partial(self._fired, layer)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def _spec(self) -> ModelSpec:
        return self._writer.meta.model

    def _fired(self, layer: int, module: "torch.nn.Module", inputs: Any, output: Any) -> None:  # noqa: ARG002
        if self._outputs is None:
            return
        if layer in self._outputs:
            raise InputError(f"router {self.names[layer]} ran twice in a pass; record one forward pass at a time")
        self._outputs[layer] = _routing(output, self._spec, self.names[layer])

    def _cells(self, outputs: dict[int, Any], num_tokens: int) -> tuple[NDArray[np.uint16], NDArray[np.float16] | None]:
        """Ids and, where the writer keeps them, weights of all layers, `[T, L, K]`."""
        for layer, name in enumerate(self.names):
            if layer not in outputs:
                raise InputError(f"router {name} did not run in the pass; expected every router to run once")
            if len(outputs[layer][0]) != num_tokens:
                raise InputError(
                    f"router {name} gave {len(outputs[layer][0])} tokens; positions were given for {num_tokens}"
                )
        layers = [outputs[layer] for layer in range(len(self.names))]
        ids = np.stack([ids for ids, _ in layers], axis=1)
        if not self._writer.weights:
            return ids, None
        for name, (_, gates) in zip(self.names, layers, strict=True):
            if gates is None:
                raise InputError(f"router {name} gives no gate weights; record without them")
        return ids, np.stack([gates for _, gates in layers], axis=1)


def _routing(output: Any, model: ModelSpec, name: str) -> tuple[NDArray[np.uint16], NDArray[np.float16] | None]:
    """Ids `[T, K]` and gate weights, where there are any, of a router's output, by descending weight."""
    import torch

    parts = output if isinstance(output, Sequence) else (output,)
    tensors = [part.detach() for part in parts if isinstance(part, torch.Tensor) and part.ndim >= 1]
    ids = next((t for t in tensors if not _is_gates(t) and t.shape[-1] == model.top_k), None)
    if ids is not None:
        gates = next((t for t in tensors if _is_gates(t) and t.shape == ids.shape), None)
    else:
        logits = next((t for t in tensors if _is_gates(t) and t.shape[-1] == model.num_experts), None)
        if logits is None:
            shapes = [tuple(t.shape) for t in tensors]
            raise InputError(
                f"router {name} gives tensors of shapes {shapes}; expected integer ids [..., {model.top_k}] or"
                f" logits [..., {model.num_experts}]"
            )
        gates, ids = logits.float().softmax(-1).topk(model.top_k)
    ids = ids.reshape(-1, model.top_k).long()
    if gates is not None:
        if not bool(gates.isfinite().all()):
            raise InputError(f"router {name} gives a gate weight or logit that is not finite; expected numbers")
        gates, order = gates.reshape(ids.shape).float().sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
    _check_ids(ids, model, name)
    return ids.cpu().numpy().astype(np.uint16), None if gates is None else gates.cpu().numpy().astype(np.float16)


def _is_gates(tensor: "torch.Tensor") -> bool:
    return bool(tensor.is_floating_point())


def _check_ids(ids: "torch.Tensor", model: ModelSpec, name: str) -> None:
    """Refuse what would not survive as uint16; -1 does, as 65535, not routed."""
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < model.num_experts:
        raise InputError(
            f"router {name} gives expert ids {int(ids.min())} to {int(ids.max())}; expected 0 to"
            f" {model.num_experts - 1}, or -1 for not routed"
        )


def _column(value: ArrayLike | None, num_tokens: int, kind: type[np.generic]) -> NDArray[Any] | None:
    """A column of T elements from as many or from one."""
    if value is None:
        return None
    column = np.asarray(value, kind).reshape(-1)
    if column.size not in (1, num_tokens):
        raise ValueError(f"{column.size} values for {num_tokens} tokens; expected one a token, or one for all")
    return np.broadcast_to(column, num_tokens)
