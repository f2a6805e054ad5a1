"""The recorder: hooks on a model's MoE layers that turn its forward passes into a trace. Token ids are never recorded.

Legend: T tokens; L MoE layers; K experts per token.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import UsageError
from ..schema import PHASES, RANK_BITS, TokenBatch, TraceMeta
from ..writer import TraceWriter
from .capture import Capture
from .embeddings import EmbeddingWriter, embedded_layers
from .kept import Kept
from .layers import moe_layers

if TYPE_CHECKING:
    import torch


def sample_ids(source_rank: int, ordinals: ArrayLike) -> NDArray[np.int64]:
    """Sample ids that ranks need not agree on: `source_rank << 40 | ordinal`, for ordinals counted on each rank."""
    return np.int64(source_rank) << np.int64(RANK_BITS) | np.asarray(ordinals, np.int64)


@contextmanager
def recording(
    model: "torch.nn.Module",
    folder: str | os.PathLike[str],
    meta: TraceMeta,
    *,
    pattern: str | None = None,
    kept: Kept | None = None,
    weights: bool = False,
    embeddings: str | Iterable[int] = (),
    rank: int = 0,
) -> Iterator["Recorder"]:
    """A recorder with files of its own: a trace in `folder` and, where layers are named, the sidecar of their inputs.

    Parameters
    ----------
    pattern, kept
        See `Recorder`.
    embeddings
        Layers whose inputs are kept, see `embedded_layers`.
    rank
        Under which the parts are named.

    Raises
    ------
    UsageError
        A layer or a number of layers that the model has not; nothing is written then.
    MismatchError, StorageError
        See `TraceWriter`.
    """
    layers = embedded_layers(embeddings, meta.model.num_layers)
    with (
        TraceWriter(folder, meta, rank=rank, weights=weights) as writer,
        EmbeddingWriter(folder, layers, rank=rank) as sidecar,
        Recorder(model, pattern, writer, kept=kept, embeddings=sidecar) as recorder,
    ):
        yield recorder


class Recorder:
    """Hooks on the MoE layers of a model, a context manager that removes them at its end.

    A router may give logits `[..., E]` (the top-k of their softmax is recorded), or a tuple that holds expert ids
    `[..., K]` (integers) and perhaps their gate weights `[..., K]` (floats). Layers are numbered in the model's order.

    Parameters
    ----------
    pattern
        A regular expression for the whole qualified names of the routers, e.g. `layers[.][0-9]+[.]moe[.]router`; None:
        found by themselves (`moe_layers`).
    writer
        Takes the tokens; it knows the model and stays open.
    kept
        Which tokens are recorded.
    embeddings
        Takes the hidden states entering its layers; it stays open.

    Raises
    ------
    UsageError
        There is another number of them than the model has MoE layers.
    """

    def __init__(
        self,
        model: "torch.nn.Module",
        pattern: str | None,
        writer: TraceWriter,
        *,
        kept: Kept | None = None,
        embeddings: EmbeddingWriter | None = None,
    ) -> None:
        spec = writer.meta.model
        layers = moe_layers(model, pattern)
        self.names = tuple(layer.name for layer in layers)
        if len(layers) != spec.num_layers:
            raise UsageError(
                f"{_source(pattern)} {len(layers)} modules ({', '.join(self.names[:3])}, ...);"
                f" {spec.name} has {spec.num_layers} MoE layers"
            )
        self._writer = writer
        self._kept = kept or Kept()
        self._embeddings = embeddings
        self._capture = Capture(layers, spec, embeddings.layers if embeddings else ())

    @property
    def num_tokens(self) -> int:
        """Tokens recorded."""
        return self._writer.num_tokens

    @property
    def full(self) -> bool:
        """Check whether as many tokens are recorded as were wanted."""
        return self._kept.full(self._writer.num_tokens)

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
            Of any shape with T elements; negative: padding, left out.
        sample, step, source_rank
            T elements, or one number for all; None: unknown (see `sample_ids` for several ranks).

        Raises
        ------
        InputError
            A router did not run, ran twice, gave another number of tokens or what is no routing.
        """
        if phase not in PHASES:
            raise UsageError(f"phase {phase!r}; expected {', '.join(PHASES)}")
        self.start()
        try:
            yield
            self.finish(position=position, sample=sample, step=step, source_rank=source_rank, phase=phase)
        finally:
            self._capture.stop()

    def start(self) -> None:
        """Watch the forward pass that follows, for `finish`; in vain once as many tokens are there as were wanted."""
        if not self.full:
            self._capture.start()

    def finish(
        self,
        *,
        position: ArrayLike,
        sample: ArrayLike | None = None,
        step: ArrayLike | None = None,
        source_rank: ArrayLike | None = None,
        phase: str = "prefill",
    ) -> None:
        """Record the pass watched since `start`; see `tokens`."""
        if self.full:
            return
        position_T = np.asarray(position, np.int32).reshape(-1)
        num_tokens = len(position_T)
        sample_T = _column(sample, num_tokens, np.int64)
        rows = self._kept.rows(position_T, sample_T, self._writer.num_tokens)
        cells = self._capture.take(num_tokens, rows, weights=self._writer.weights)
        columns = {
            "step": _column(step, num_tokens, np.int32),
            "sample": sample_T,
            "position": position_T,
            "source_rank": _column(source_rank, num_tokens, np.int32),
            "phase": np.full(num_tokens, PHASES.index(phase), np.int8),
        }
        kept: dict[str, Any] = {n: c if c is None or rows is None else c[rows] for n, c in columns.items()}
        batch = TokenBatch(**kept, ids=cells.ids, weights=cells.weights)
        self._writer.append(batch)
        if self._embeddings is not None:
            self._embeddings.append(batch, cells.inputs)

    def flush(self) -> None:
        """Write what is buffered, so that a kill does not lose it."""
        self._writer.flush()
        if self._embeddings is not None:
            self._embeddings.flush()

    def __enter__(self) -> Self:
        self._capture.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._capture.detach()


def _source(pattern: str | None) -> str:
    return "the model shows" if pattern is None else f"router pattern {pattern!r} matches"


def _column(value: ArrayLike | None, num_tokens: int, kind: type[np.generic]) -> NDArray[Any] | None:
    """A column of T elements from as many or from one."""
    if value is None:
        return None
    column = np.asarray(value, kind).reshape(-1)
    if column.size not in (1, num_tokens):
        raise ValueError(f"{column.size} values for {num_tokens} tokens; expected one a token, or one for all")
    return np.broadcast_to(column, num_tokens)
