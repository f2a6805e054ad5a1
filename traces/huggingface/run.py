"""Running a causal language model over prompts, prefill and greedy decoding, under a recorder.

Legend: B prompts of a batch; S columns, the longest prompt; padding on the left, so that all prompts end together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..recording.recorder import Recorder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["Batch", "batches", "run"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Some prompts.

    Parameters
    ----------
    samples
        int64 `[B]`, the ordinal of each prompt.
    tokens
        int64 `[B, S]`; 0 in padding.
    position
        int32 `[B, S]`; -1 in padding.
    """

    samples: NDArray[np.int64]
    tokens: NDArray[np.int64]
    position: NDArray[np.int32]


def batches(prompts: Sequence[Sequence[int]], samples: NDArray[np.int64], batch_samples: int) -> Iterator[Batch]:
    """Batches of the selected prompts, in order, at most `batch_samples` in each."""
    for start in range(0, len(samples), batch_samples):
        chosen_B = samples[start : start + batch_samples]
        width = max(len(prompts[sample]) for sample in chosen_B)
        tokens_BS = np.zeros((len(chosen_B), width), np.int64)
        position_BS = np.full(tokens_BS.shape, -1, np.int32)
        for row, sample in enumerate(chosen_B):
            length = len(prompts[sample])
            tokens_BS[row, width - length :] = prompts[sample]
            position_BS[row, width - length :] = np.arange(length)
        yield Batch(chosen_B, tokens_BS, position_BS)


def run(model: "PreTrainedModel", batch: Batch, recorder: Recorder, *, generate: int = 0) -> None:
    """Record the prompts of a batch, and up to `generate` tokens that the model continues each with.

    A prompt ends before its end-of-text token, which is not run; the most likely token is taken, its keys and values
    cached.
    """
    import torch

    device = model.device
    position_BS = torch.from_numpy(batch.position).to(device)
    mask_BS = (position_BS >= 0).long()
    with torch.inference_mode():
        with recorder.tokens(
            position=batch.position, sample=batch.samples.repeat(batch.position.shape[1]), phase="prefill"
        ):
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

    ends = torch.tensor(_end_tokens(model), device=mask_BS.device, dtype=torch.long)
    length_B = mask_BS.sum(1)
    alive_B = torch.ones_like(length_B, dtype=torch.bool)
    for offset in range(generate):
        token_B = output.logits[:, -1].argmax(-1)
        alive_B &= ~torch.isin(token_B, ends)
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


def _end_tokens(model: "PreTrainedModel") -> list[int]:
    config: Any = model.generation_config
    ends = None if config is None else config.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]
