"""Recording a Hugging Face MoE model in a local directory on samples of text."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from ..model import ModelSpec
from ..recording.kept import Kept, chosen_samples
from ..recording.layers import moe_layers
from ..recording.recorder import Recorder, recording
from ..recording.spec import spec_of
from ..schema import TraceMeta
from .run import Batch, batches, run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Recording", "record_model"]


@dataclass(frozen=True, slots=True)
class Recording:
    """Result of recording: the model, the number of tokens, and whether Ctrl-C cut it short."""

    spec: ModelSpec
    num_tokens: int
    interrupted: bool


def record_model(
    model: "PreTrainedModel",
    prompts: Sequence[Sequence[int]],
    destination: str | os.PathLike[str],
    *,
    name: str,
    tokenizer: str,
    generate: int = 0,
    router: str | None = None,
    weights: bool = False,
    sample_rate: float = 1.0,
    max_tokens: int | None = None,
    embeddings: str = "",
    batch_samples: int = 8,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Recording:
    """Run a model over prompts and write where their tokens go; what was flushed stays, whatever happens.

    Parameters
    ----------
    name, tokenizer
        What the trace calls the model, and says of the tokenizer (`tokenizer_label`).
    generate
        Tokens decoded and recorded after each prompt, fewer where the model ends its text.
    router
        A pattern for the names of the routers, where they are not found by themselves.
    embeddings
        Layers whose inputs go to a sidecar: `all`, or ordinals with commas between them.

    Raises
    ------
    UsageError
        The destination is there and not empty, a prompt does not fit the model, or no layer is an MoE layer.
    """
    folder = Path(destination)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder}: already there and not empty; choose another destination or remove it")
    _check_lengths(model, prompts, generate)
    spec = spec_of(model, moe_layers(model, router), name)
    kept = Kept(max_tokens=max_tokens, sample_rate=sample_rate)
    samples = chosen_samples(len(prompts), sample_rate)
    meta = TraceMeta(form="tokens", model=spec, tokenizer=tokenizer, recorder=_recorder(model))
    try:
        with recording(
            model, folder, meta, pattern=router, kept=kept, weights=weights, embeddings=embeddings
        ) as recorder:
            told = _Told(on_progress, len(samples), max_tokens)
            interrupted = _interrupted(model, batches(prompts, samples, batch_samples), recorder, generate, told)
        return Recording(spec, recorder.num_tokens, interrupted)
    finally:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _interrupted(
    model: "PreTrainedModel",
    work: Iterable[Batch],
    recorder: Recorder,
    generate: int,
    told: "_Told",
) -> bool:
    """Run every batch, or as many as are wanted; whether Ctrl-C came first."""
    done = 0
    try:
        for batch in work:
            told(done, recorder.num_tokens)
            run(model, batch, recorder, generate=generate)
            done += len(batch.samples)
            if recorder.full:
                break
    except KeyboardInterrupt:
        return True
    return False


class _Told:
    """Says how much is recorded and, from then on, how long the rest will take at that rate."""

    def __init__(self, say: Callable[[str], None], num_samples: int, max_tokens: int | None) -> None:
        self._say = say
        self._num_samples = num_samples
        self._max_tokens = max_tokens
        self._start_s = time.monotonic()

    def __call__(self, done: int, num_tokens: int) -> None:
        share = max(done / self._num_samples, num_tokens / self._max_tokens if self._max_tokens else 0.0)
        text = f"recorded {done:,} of {self._num_samples:,} samples, {num_tokens:,} tokens"
        if share:
            minutes, seconds = divmod(round((time.monotonic() - self._start_s) * (1 / share - 1)), 60)
            text += f", {minutes}:{seconds:02} left"
        self._say(text)


def _check_lengths(model: "PreTrainedModel", prompts: Sequence[Sequence[int]], generate: int) -> None:
    """Refuse, before the first pass, a prompt longer than the model's positions or with tokens it does not know."""
    config = model.config.get_text_config()
    most, known = getattr(config, "max_position_embeddings", None), config.vocab_size
    for number, prompt in enumerate(prompts):
        if most is not None and len(prompt) + generate > most:
            raise UsageError(
                f"sample {number} has {len(prompt):,} tokens and {generate:,} to generate; the model takes {most:,}"
            )
        if max(prompt) >= known:
            raise UsageError(
                f"sample {number} has token {max(prompt)}; the model knows {known:,}: another tokenizer's?"
            )


def _recorder(model: "PreTrainedModel") -> str:
    import transformers

    return f"moeplan, {type(model).__name__} of transformers {transformers.__version__}"
