"""Small random traces, in memory and on disk."""

from collections.abc import Callable

import numpy as np

from moeplan.traces.model import NOT_ROUTED, ModelSpec
from moeplan.traces.reader import Trace
from moeplan.traces.schema import TokenBatch, TraceMeta

MakeTrace = Callable[..., Trace]
META = TraceMeta(form="tokens", model=ModelSpec(name="tiny", layer_ids=(1, 2, 4), num_experts=6, top_k=2), recorder="x")
COUNTS_META = META.model_copy(update={"form": "counts"})


def make_batch(
    tokens: int = 100, *, seed: int = 0, dropped: float = 0.1, known: tuple[str, ...] = ("sample",), top_k: int = 2
) -> TokenBatch:
    rng = np.random.default_rng(seed)
    cells = (tokens, META.model.num_layers, top_k)
    ids = rng.integers(0, META.model.num_experts, cells).astype(np.uint16)
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
