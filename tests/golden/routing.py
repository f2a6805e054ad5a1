"""Small traces with structure: busy experts, chains from layer to layer, partners in a layer, samples with a topic.

Legend: T tokens; L MoE layers; K experts per token.
"""

from pathlib import Path
from typing import Any

import numpy as np

from moeplan.traces.count_form import tabulate, write_counts
from moeplan.traces.model import NOT_ROUTED, Attention, ModelSpec
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import PHASES, TokenBatch, TraceMeta
from moeplan.traces.writer import TraceWriter

PREFILL = 6  # tokens of a sample
SIZES: dict[str, Any] = {"hidden_size": 1024, "ffn_size": 96, "dtype_bytes": 2, "attention": Attention(kv_size=256)}
Ids = np.ndarray[Any, Any]


def write_trace(
    folder: Path,
    *,
    experts: int = 16,
    layers: int = 4,
    top_k: int = 2,
    groups: int | None = None,
    form: str = "tokens",
    seed: int = 0,
    chains: int = 0,
    samples: int = 96,
    length: int = 10,
    columns: tuple[str, ...] = ("sample",),
    training: bool = False,
    unrouted: float = 0.0,
) -> None:
    """Write a trace of tokens, or the counts of one; `chains` seeds what tokens follow, `seed` all else.

    `columns` are those recorded of sample, step (8 samples each) and source_rank (4 ranks).
    """
    model = ModelSpec(
        name="made", layer_ids=tuple(range(layers)), num_experts=experts, top_k=top_k, num_expert_groups=groups, **SIZES
    )
    rng, sample = np.random.default_rng(seed), np.repeat(np.arange(samples), length)
    ids = _ids(rng, np.random.default_rng(chains), model, sample)
    ids[rng.random(ids.shape) < unrouted] = NOT_ROUTED
    position = np.tile(np.arange(length, dtype=np.int32), samples)
    phases = ["train" if training else "prefill" if place < PREFILL else "decode" for place in position]
    batch = TokenBatch(
        step=(sample // 8).astype(np.int32) if "step" in columns else None,
        sample=sample * 7 if "sample" in columns else None,
        position=position,
        source_rank=(sample % 4).astype(np.int32) if "source_rank" in columns else None,
        phase=np.array([PHASES.index(phase) for phase in phases], np.int8),
        ids=ids,
    )
    meta = TraceMeta(form="tokens", model=model, recorder="golden")
    tokens = folder if form == "tokens" else folder.with_name(f"{folder.name}-tokens")
    with TraceWriter(tokens, meta) as writer:
        writer.append(batch)
    if form == "counts":
        write_counts(folder, meta.model_copy(update={"form": "counts"}), tabulate(open_trace(tokens)))


def _ids(rng: np.random.Generator, chains: np.random.Generator, model: ModelSpec, sample: Ids) -> Ids:
    """The experts of every token, uint16 `[T, L, K]`.

    A first choice is its sample's topic, or follows that of the layer before, or is any expert; the second is one of
    its two partners, and so on.
    """
    experts, size = model.num_experts, len(sample)
    first_T = np.where(rng.random(size) < 0.5, _busy(rng, experts, sample[-1] + 1)[sample], _busy(rng, experts, size))
    ids = np.empty((size, model.num_layers, model.top_k), np.uint16)
    for layer in range(model.num_layers):
        if layer:
            followed = rng.random(size) < 0.7
            first_T = np.where(followed, chains.permutation(experts)[first_T], _busy(rng, experts, size))
        partner_T = chains.integers(1, experts, size=2)[(rng.random(size) < 0.4).astype(int)]
        ids[:, layer] = (first_T[:, None] + partner_T[:, None] * np.arange(model.top_k)) % experts
    return ids


def _busy(rng: np.random.Generator, experts: int, size: int) -> Ids:
    """Experts, early ones more often."""
    return rng.integers(experts, size=size) * rng.integers(1, experts + 1, size=size) // experts
