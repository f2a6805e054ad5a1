"""Small random traces, in memory and on disk."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeplan.traces.model import NOT_ROUTED, ModelSpec
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.schema import TokenBatch, TraceMeta
from moeplan.traces.writer import TraceWriter


@pytest.fixture
def meta() -> TraceMeta:
    """A model of 3 layers, 6 experts, top-2."""
    model = ModelSpec(name="tiny", layer_ids=(1, 2, 4), num_experts=6, top_k=2)
    return TraceMeta(form="tokens", model=model, recorder="test")


@pytest.fixture
def make_batch(meta: TraceMeta) -> Callable[..., TokenBatch]:
    def make(
        tokens: int = 100,
        *,
        seed: int = 0,
        dropped: float = 0.1,
        known: tuple[str, ...] = ("sample",),
        top_k: int = meta.model.top_k,
    ) -> TokenBatch:
        rng = np.random.default_rng(seed)
        cells = (tokens, meta.model.num_layers, top_k)
        ids = rng.integers(0, meta.model.num_experts, cells).astype(np.uint16)
        ids[rng.random(cells) < dropped] = NOT_ROUTED
        return TokenBatch(
            step=np.sort(rng.integers(0, 5, tokens)).astype(np.int32) if "step" in known else None,
            sample=np.sort(rng.integers(-3, 20, tokens)).astype(np.int64) if "sample" in known else None,
            position=np.arange(tokens, dtype=np.int32),
            source_rank=rng.integers(0, 4, tokens).astype(np.int32) if "source_rank" in known else None,
            phase=rng.integers(0, 3, tokens).astype(np.int8),
            ids=ids,
            weights=np.sort(rng.random(cells).astype(np.float16), axis=-1)[..., ::-1].copy(),
        )

    return make


@pytest.fixture
def make_trace(tmp_path: Path, meta: TraceMeta) -> Callable[..., Trace]:
    """Write batches, each as a part of its own, and open them."""

    def make(*batches: TokenBatch, name: str = "trace", weights: bool = True, top_k: int = meta.model.top_k) -> Trace:
        sized = meta.model_copy(update={"model": replace(meta.model, top_k=top_k)})
        with TraceWriter(tmp_path / name, sized, weights=weights) as writer:
            for batch in batches:
                writer.append(batch)
                writer.flush()
        return open_trace(tmp_path / name)

    return make
