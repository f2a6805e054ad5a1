"""Recording the routing of the embedded model on text."""

import os

import numpy as np
import torch

from ...files import atomic_directory
from ...traces.reader import Trace, open_trace
from ...traces.recording.kept import Kept, chosen_samples
from ...traces.recording.recorder import recording
from ...traces.schema import TraceMeta
from .model import load_embedded
from .text import samples

__all__ = ["SAMPLE_TOKENS", "record_embedded"]

SAMPLE_TOKENS = 128
BATCH_SAMPLES = 16


def record_embedded(
    text: str,
    destination: str | os.PathLike[str],
    *,
    sample_tokens: int = SAMPLE_TOKENS,
    weights: bool = False,
    sample_rate: float = 1.0,
    max_tokens: int | None = None,
    embeddings: str = "",
) -> Trace:
    """Run the embedded model over a text cut into samples, and write where its tokens go as a trace.

    Parameters
    ----------
    sample_tokens
        Bytes of a sample; a rest at the end is left out.
    sample_rate, max_tokens
        See `Kept`.
    embeddings
        Layers whose inputs go to a sidecar (`embedded_layers`).

    Raises
    ------
    UsageError
        The text does not fill one sample, or the destination is there and not empty.
    StorageError
        The destination cannot be written; it appears whole or not at all.
    """
    model = load_embedded()
    spec = model.config.spec()
    tokens_IS = torch.from_numpy(samples(text, sample_tokens))
    kept = Kept(sample_rate=sample_rate, max_tokens=max_tokens)
    chosen = chosen_samples(len(tokens_IS), sample_rate)
    meta = TraceMeta(form="tokens", model=spec, tokenizer="bytes", recorder="moeplan router hooks")
    position_S = np.arange(sample_tokens, dtype=np.int32)
    with (
        atomic_directory(destination) as directory,
        recording(model, directory, meta, kept=kept, weights=weights, embeddings=embeddings) as recorder,
        torch.inference_mode(),
    ):
        for start in range(0, len(chosen), BATCH_SAMPLES):
            if recorder.full:
                break
            batch_B = chosen[start : start + BATCH_SAMPLES]
            position_T = np.tile(position_S, len(batch_B))
            with recorder.tokens(sample=batch_B.repeat(sample_tokens), position=position_T, phase="prefill"):
                model(tokens_IS[batch_B])
    return open_trace(destination)
