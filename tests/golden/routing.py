"""Small traces with structure: busy experts, chains from layer to layer, partners in a layer, samples with a topic.

Legend: T tokens; S samples.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from moeplan.traces.count_form import tabulate, write_counts
from moeplan.traces.model import NOT_ROUTED, Attention, ModelSpec
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import PHASES, TokenBatch, TraceMeta
from moeplan.traces.writer import TraceWriter

__all__ = ["write_trace"]

PREFILL = 6  # tokens of a sample


def write_trace(
    folder: Path,
    *,
    form: Literal["tokens", "counts"] = "tokens",
    seed: int = 0,
    chains: int = 0,
    experts: int = 16,
    layers: int = 4,
    top_k: int = 2,
    groups: int | None = None,
    samples: int = 96,
    length: int = 10,
    columns: tuple[str, ...] = ("sample",),
    training: bool = False,
    unrouted: float = 0.0,
) -> None:
    """Write a trace of tokens, or the counts of one.

    Parameters
    ----------
    seed, chains
        Of the tokens; of the chains that they follow, so that traces of one model may differ in either.
    columns
        Of "sample", "step" (8 samples each) and "source_rank" (4 ranks), those recorded.
    """
    model = ModelSpec(
        name=f"golden-{experts}",
        layer_ids=tuple(range(layers)),
        num_experts=experts,
        top_k=top_k,
        num_expert_groups=groups,
        hidden_size=1024,
        ffn_size=96,
        dtype_bytes=2,
        attention=Attention(kv_size=256),
    )
    ids, sample = _ids(seed, chains, model, samples, length), np.repeat(np.arange(samples), length)
    ids[np.random.default_rng(seed).random(ids.shape) < unrouted] = NOT_ROUTED
    position = np.tile(np.arange(length, dtype=np.int32), samples)
    by_position = np.where(position < PREFILL, PHASES.index("prefill"), PHASES.index("decode"))
    batch = TokenBatch(
        step=(sample // 8).astype(np.int32) if "step" in columns else None,
        sample=sample * 7 if "sample" in columns else None,
        position=position,
        source_rank=(sample % 4).astype(np.int32) if "source_rank" in columns else None,
        phase=(np.full_like(by_position, PHASES.index("train")) if training else by_position).astype(np.int8),
        ids=ids,
    )
    meta = TraceMeta(form="tokens", model=model, recorder="golden")
    tokens = folder if form == "tokens" else folder.with_name(f"{folder.name}-tokens")
    with TraceWriter(tokens, meta) as writer:
        writer.append(batch)
    if form == "counts":
        write_counts(folder, meta.model_copy(update={"form": "counts"}), tabulate(open_trace(tokens)))


def _ids(seed: int, chains: int, model: ModelSpec, samples: int, length: int) -> np.ndarray:
    """The experts of every token, uint16 `[T, L, K]`.

    A first choice is a sample's topic, or follows that of the layer before, or is any expert, early ones more often;
    the second is its partner, or the one after it, and so on.
    """
    experts, size = model.num_experts, samples * length
    rng, links = np.random.default_rng(seed), np.random.default_rng(chains)
    topic_T = np.repeat(_busy(rng, experts, samples), length)
    first_T = np.where(rng.random(size) < 0.5, topic_T, _busy(rng, experts, size))
    ids = np.empty((size, model.num_layers, model.top_k), np.uint16)
    for layer in range(model.num_layers):
        if layer:
            followed = rng.random(size) < 0.7
            first_T = np.where(followed, links.permutation(experts)[first_T], _busy(rng, experts, size))
        partner = np.where(rng.random(size) < 0.6, links.integers(1, experts), links.integers(1, experts))
        ids[:, layer] = (first_T[:, None] + partner[:, None] * np.arange(model.top_k)) % experts
    return ids


def _busy(rng: np.random.Generator, experts: int, size: int) -> np.ndarray:
    return rng.integers(experts, size=size) * rng.integers(1, experts + 1, size=size) // experts
