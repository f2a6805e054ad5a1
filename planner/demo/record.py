"""Recording the routing of the embedded model on text."""

import os

import numpy as np
import torch

from ...files import atomic_directory
from ...traces.reader import Trace, open_trace
from ...traces.recorder import Recorder
from ...traces.schema import TraceMeta
from ...traces.writer import TraceWriter
from .model import load_embedded
from .text import samples

__all__ = ["MODEL_NAME", "ROUTERS", "SAMPLE_TOKENS", "record_embedded"]

MODEL_NAME = "embedded"
ROUTERS = r"layers\.\d+\.moe\.router"
SAMPLE_TOKENS = 128
BATCH_SAMPLES = 16


def record_embedded(
    text: str, destination: str | os.PathLike[str], *, sample_tokens: int = SAMPLE_TOKENS, weights: bool = False
) -> Trace:
    """Run the embedded model over a text cut into samples, and write where its tokens go as a trace.

    Parameters
    ----------
    sample_tokens
        Bytes of a sample; a rest at the end is left out.

    Raises
    ------
    UsageError
        The text does not fill one sample, or the destination is there and not empty.
    StorageError
        The destination cannot be written; it appears whole or not at all.
    """
    model = load_embedded()
    tokens_IS = torch.from_numpy(samples(text, sample_tokens))
    meta = TraceMeta(form="tokens", model=model.config.spec(), tokenizer="bytes", recorder="moeplan router hooks")
    position_S = np.arange(sample_tokens, dtype=np.int32)
    with (
        atomic_directory(destination) as directory,
        TraceWriter(directory, meta, weights=weights) as writer,
        Recorder(model, ROUTERS, writer) as recorder,
        torch.inference_mode(),
    ):
        for start in range(0, len(tokens_IS), BATCH_SAMPLES):
            batch_BS = tokens_IS[start : start + BATCH_SAMPLES]
            sample_T = np.repeat(np.arange(start, start + len(batch_BS)), sample_tokens)
            with recorder.tokens(sample=sample_T, position=np.tile(position_S, len(batch_BS)), phase="prefill"):
                model(batch_BS)
    return open_trace(destination)
