"""Recording a training loop, or any loop that calls a model, in two lines.

Legend: B rows; S columns; T = B S tokens, row by row.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..model import ModelSpec
from ..schema import TraceMeta
from .kept import Kept
from .layers import moe_layers, spec_of
from .passes import Pass, pass_of
from .recorder import Recorder, recording, sample_ids

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def record(
    model: "nn.Module",
    path: str | os.PathLike[str],
    *,
    pattern: str | None = None,
    spec: ModelSpec | None = None,
    tokenizer: str | None = None,
    rank: int | None = None,
    step_per_forward: bool = True,
    warmup_steps: int = 0,
    sample_rate: float = 1.0,
    max_tokens: int | None = None,
    weights: bool = False,
    embeddings: Sequence[int] | Literal["all"] = (),
) -> Iterator["LoopRecorder"]:
    """Record every forward pass of `model` inside the block as a trace; see `LoopRecorder` for what is recorded.

    Parameters
    ----------
    path
        A directory, of which every rank writes its own parts.
    pattern
        The names of the routers, where they are not found by themselves (`moe_layers`).
    spec
        The model, where its configuration does not tell (`spec_of`).
    rank
        The source rank; by default that of torch.distributed, else 0.
    step_per_forward
        Each pass is a step; False: `LoopRecorder.step` ends one, e.g. with gradients accumulated over passes.
    warmup_steps
        Steps at the start that are not recorded.
    sample_rate, max_tokens
        See `Kept`; max_tokens counts on each rank.
    embeddings
        Layers whose inputs go to a sidecar (`EmbeddingWriter`).

    Raises
    ------
    UsageError
        The model has no MoE layer that is known, or the directory holds parts of this rank.
    MismatchError
        It holds a trace of another model.
    InputError
        In a pass: a layer did not run, or showed what is no routing of these tokens.
    StorageError
        The parts cannot be written.
    """
    source_rank = _rank() if rank is None else rank
    spec = spec or spec_of(model, moe_layers(model, pattern))
    kept = Kept(sample_rate=sample_rate, max_tokens=max_tokens)
    meta = TraceMeta(form="tokens", model=spec, tokenizer=tokenizer, recorder="moeplan.traces.record")
    files = recording(
        model, path, meta, pattern=pattern, kept=kept, weights=weights, embeddings=embeddings, rank=source_rank
    )
    with files as recorder:
        loop = LoopRecorder(model, recorder, source_rank, warmup_steps, step_per_forward)
        try:
            yield loop
        finally:
            loop.detach()


class LoopRecorder:
    """Hooks on a model itself that turn each call of it into a recorded pass.

    A row of the arguments is a sample, `source_rank << 40 | ordinal`, rows counted on each rank; so is each piece of a
    packed row. The phase is train while `model.training`, else decode for one token a row after cached ones, else
    prefill; a pass over cached tokens goes on with the samples of the pass before. Passes that activation checkpointing
    repeats inside the backward pass are not recorded.
    """

    def __init__(
        self, model: "nn.Module", recorder: Recorder, source_rank: int, warmup_steps: int, step_per_forward: bool
    ) -> None:
        self._recorder = recorder
        self._source_rank = source_rank
        self._warmup_steps = warmup_steps
        self._step_per_forward = step_per_forward
        self._step = 0
        self._num_samples = 0
        self._last_B: NDArray[np.int64] = np.empty(0, np.int64)
        self._pass: Pass | None = None
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._begins, with_kwargs=True),
            model.register_forward_hook(self._ended),
        ]

    def step(self, *_: object) -> None:
        """End the step; may be given to `optimizer.register_step_post_hook`."""
        self._step += 1

    def flush(self) -> None:
        """Write what is buffered, so that a kill does not lose it."""
        self._recorder.flush()

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begins(self, model: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _in_backward():
            return
        self._pass = pass_of(model, args, kwargs)
        if self._step >= self._warmup_steps:
            self._recorder.start()

    def _ended(self, model: "nn.Module", args: Any, output: Any) -> None:
        del args, output
        if self._pass is None or _in_backward():
            return
        seen, self._pass = self._pass, None
        position_BS = seen.positions()
        sample_BS = self._samples(seen, position_BS)
        decodes = seen.num_cached > 0 and seen.columns == 1
        if self._step >= self._warmup_steps:
            self._recorder.finish(
                position=position_BS,
                sample=sample_ids(self._source_rank, sample_BS),
                step=self._step,
                source_rank=self._source_rank,
                phase="train" if model.training else "decode" if decodes else "prefill",
            )
        if self._step_per_forward:
            self.step()

    def _samples(self, seen: Pass, position_BS: NDArray[np.int32]) -> NDArray[np.int64]:
        """The ordinal of each token's sample, `[B, S]`: those of the last pass where it goes on, else new ones."""
        if seen.num_cached and len(self._last_B) == seen.rows:
            return np.broadcast_to(self._last_B[:, None], position_BS.shape)
        starts_BS = position_BS == 0
        starts_BS[:, 0] |= (position_BS[:, 0] > 0) | ~starts_BS.any(1)
        ordinal_BS: NDArray[np.int64] = self._num_samples - 1 + starts_BS.cumsum().reshape(starts_BS.shape)
        self._num_samples += int(starts_BS.sum())
        self._last_B = ordinal_BS[:, -1]
        return ordinal_BS


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _in_backward() -> bool:
    """Check whether autograd is running a backward pass, as when a whole model is checkpointed."""
    import torch

    return torch._C._current_graph_task_id() != -1
