"""Recording a Hugging Face MoE model on samples of text: prefill and greedy decoding, under a recorder.

Legend: B prompts of a batch; S columns, the longest prompt; padding on the left, so that all prompts end together.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...files import check_target
from ..model import ModelSpec
from ..recording.kept import Kept, chosen_samples
from ..recording.layers import moe_layers, spec_of
from ..recording.recorder import Recorder, recording
from ..schema import TraceMeta

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


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
        Names of the model and of its tokenizer in the trace (`tokenizer_label`).
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
    import transformers

    folder = Path(destination)
    check_target(folder, directory=True)
    _check_lengths(model, prompts, generate)
    spec = spec_of(model, moe_layers(model, router), name)
    kept = Kept(max_tokens=max_tokens, sample_rate=sample_rate)
    samples = chosen_samples(len(prompts), sample_rate)
    maker = f"moeplan, {type(model).__name__} of transformers {transformers.__version__}"
    meta = TraceMeta(form="tokens", model=spec, tokenizer=tokenizer, recorder=maker)
    options: dict[str, Any] = {"pattern": router, "kept": kept, "weights": weights, "embeddings": embeddings}
    progress, interrupted = _Progress(on_progress, len(samples), max_tokens), False
    try:
        with recording(model, folder, meta, **options) as recorder:
            try:
                for done, batch in _batches(prompts, samples, batch_samples):
                    progress(done, recorder.num_tokens)
                    _run(model, batch, recorder, generate)
                    if recorder.full:
                        break
            except KeyboardInterrupt:
                interrupted = True
        return Recording(spec, recorder.num_tokens, interrupted)
    finally:
        if _is_empty(folder):
            folder.rmdir()


@dataclass(frozen=True, slots=True)
class _Progress:
    """Says how much is recorded and, from then on, how long the rest will take at that rate."""

    say: Callable[[str], None]
    num_samples: int
    max_tokens: int | None
    start_s: float = field(default_factory=lambda: time.monotonic())

    def __call__(self, done: int, num_tokens: int) -> None:
        share = max(done / self.num_samples, num_tokens / self.max_tokens if self.max_tokens else 0.0)
        text = f"recorded {done:,} of {self.num_samples:,} samples, {num_tokens:,} tokens"
        if share:
            minutes, seconds = divmod(round((time.monotonic() - self.start_s) * (1 / share - 1)), 60)
            text += f", {minutes}:{seconds:02} left"
        self.say(text)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Batch of prompts: ordinals int64 `[B]`, token ids int64 and positions int32 `[B, S]`, 0 and -1 in padding."""

    samples: NDArray[np.int64]
    tokens: NDArray[np.int64]
    position: NDArray[np.int32]


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


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


def _batches(
    prompts: Sequence[Sequence[int]], samples: NDArray[np.int64], batch_samples: int
) -> Iterator[tuple[int, _Batch]]:
    """Batches of the selected prompts in order, at most `batch_samples` in each, and how many prompts came before."""
    for start in range(0, len(samples), batch_samples):
        chosen_B = samples[start : start + batch_samples]
        width = max(len(prompts[sample]) for sample in chosen_B)
        tokens_BS = np.zeros((len(chosen_B), width), np.int64)
        position_BS = np.full(tokens_BS.shape, -1, np.int32)
        for row, sample in enumerate(chosen_B):
            length = len(prompts[sample])
            tokens_BS[row, width - length :] = prompts[sample]
            position_BS[row, width - length :] = np.arange(length)
        yield start, _Batch(chosen_B, tokens_BS, position_BS)


def _run(model: "PreTrainedModel", batch: _Batch, recorder: Recorder, generate: int) -> None:
    """Record the prompts of a batch, and up to `generate` tokens that the model continues each with.

    A prompt ends before its end-of-text token, which is not run; the most likely token is taken, its keys and values
    cached.
    """
    import torch

    device, sample_BS = model.device, batch.samples.repeat(batch.position.shape[1])
    position_BS = torch.from_numpy(batch.position).to(device)
    mask_BS = (position_BS >= 0).long()
    with torch.inference_mode():
        with recorder.tokens(position=batch.position, sample=sample_BS, phase="prefill"):
            output = model(
                input_ids=torch.from_numpy(batch.tokens).to(device),
                attention_mask=mask_BS,
                position_ids=position_BS.clamp(min=0).long(),
                use_cache=generate > 0,
                logits_to_keep=1,
            )
        _decode(model, batch.samples, output, mask_BS, recorder, generate)


def _decode(
    model: "PreTrainedModel",
    samples_B: NDArray[np.int64],
    output: Any,
    mask_BS: "torch.Tensor",
    recorder: Recorder,
    generate: int,
) -> None:
    import torch

    config: Any = model.generation_config
    end = None if config is None else config.eos_token_id
    ends = end if isinstance(end, list) else [] if end is None else [end]
    end_tokens = torch.tensor(ends, device=mask_BS.device, dtype=torch.long)
    length_B = mask_BS.sum(1)
    alive_B = torch.ones_like(length_B, dtype=torch.bool)
    for offset in range(generate):
        token_B = output.logits[:, -1].argmax(-1)
        alive_B &= ~torch.isin(token_B, end_tokens)
        if recorder.full or not bool(alive_B.any()):
            return
        mask_BS = torch.cat([mask_BS, torch.ones_like(mask_BS[:, :1])], 1)
        position_B = length_B + offset
        recorded_B = torch.where(alive_B, position_B, -1).cpu().numpy()
        with recorder.tokens(position=recorded_B, sample=samples_B, phase="decode"):
            output = model(
                input_ids=token_B[:, None],
                attention_mask=mask_BS,
                position_ids=position_B[:, None],
                past_key_values=output.past_key_values,
                use_cache=True,
            )
