"""The text of the embedded model, and its routing recorded on text.

The text is Python's own documentation, as every installation carries it in `pydoc_data.topics`.

Topics repeat each other, so each paragraph counts once, by its words. `heldout.txt` ships: of the blocks of consecutive
paragraphs (2,048 characters and more) in Python 3.11, every sixth, alternately to its first and its second half.
What other Pythons carry differs a little; none of the shipped paragraphs is ever trained on.

Legend: I samples; S positions.
"""

import contextlib
import os
from collections.abc import Iterator
from importlib.resources import files

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import UsageError
from ...files import atomic_directory
from ...traces.reader import Trace, open_trace
from ...traces.recording.kept import Kept, chosen_samples
from ...traces.recording.recorder import recording
from ...traces.schema import TraceMeta
from .model import load_embedded

SAMPLE_TOKENS = 128
BATCH_SAMPLES = 16


def training_text() -> str:
    """The documentation in the running Python, topics sorted, without repeated and held-out paragraphs."""
    from pydoc_data.topics import topics

    seen = {"", *map(_words, _paragraphs(_held_out()))}
    fresh: list[str] = []
    for topic in sorted(topics):
        for paragraph in _paragraphs(topics[topic]):
            if _words(paragraph) not in seen:
                seen.add(_words(paragraph))
                fresh.append(paragraph)
    return "\n\n".join(fresh)


def record_text() -> str:
    """The half of the held-out text that traces are recorded on; it ends where a paragraph does."""
    text = _held_out()
    return text[: text.index("\n\n", len(text) // 2)]


def other_text() -> str:
    """The half of the held-out text that neither training nor recording sees."""
    return _held_out().removeprefix(record_text()).lstrip("\n")


def samples(text: str, length: int) -> NDArray[np.int64]:
    """The UTF-8 bytes of `text` cut into samples, `[I, length]`; an incomplete last one is dropped.

    UsageError where the text does not fill one sample.
    """
    tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
    if not 1 <= length <= len(tokens):
        raise UsageError(
            f"a text of {len(tokens)} bytes does not fill a sample of {length} (a token is a byte); give more text or"
            " another --sample-tokens"
        )
    return tokens[: len(tokens) // length * length].reshape(-1, length)


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
    sample_rate, max_tokens, embeddings
        As of `Kept`; layers whose inputs go to a sidecar (`embedded_layers`).

    Raises
    ------
    UsageError
        The text does not fill one sample, or the destination is there and not empty.
    StorageError
        The destination cannot be written; it appears whole or not at all.
    """
    model, tokens_IS = load_embedded(), torch.from_numpy(samples(text, sample_tokens))
    kept, chosen = Kept(sample_rate=sample_rate, max_tokens=max_tokens), chosen_samples(len(tokens_IS), sample_rate)
    meta = TraceMeta(form="tokens", model=model.config.spec(), tokenizer="bytes", recorder="moeplan router hooks")
    position_S = np.arange(sample_tokens, dtype=np.int32)
    with (
        _one_thread(),  # such small products are slower on several, by much on a busy machine
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


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _held_out() -> str:
    return (files(__package__) / "heldout.txt").read_text(encoding="utf-8")


def _paragraphs(text: str) -> list[str]:
    return text.strip("\n").split("\n\n")


def _words(paragraph: str) -> str:
    return " ".join(paragraph.split())
