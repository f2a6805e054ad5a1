"""Small checkpoints of every family, randomly initialised and saved with a tokenizer of single characters."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.traces.huggingface.families import FAMILIES, SIZES

CHARACTERS = "abcdefghijklmnopqrstuvwxyz ,.\n"


def build(family: str) -> Any:
    """A model of a family with weights spread enough that no two experts of a token are near a tie."""
    import transformers

    prefix, sizes = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **sizes})
    torch.manual_seed(3)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if any(word in name for word in ("gate.weight", "router.weight", "router.bias", "e_score_correction_bias")):
                tensor.copy_(torch.randn_like(tensor) * (0.05 if "bias" in name else 1.0))
    return model.eval()


@functools.cache
def tokenizer_json() -> str:
    """A tokenizer of single characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return str(tokenizer.to_str())


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(family)`: the directory of a saved model and tokenizer, made once."""

    @functools.cache
    def make(family: str) -> Path:
        import transformers

        folder = tmp_path_factory.mktemp(family) / f"tiny-{family}"
        build(family).save_pretrained(folder)
        (folder / "raw.json").write_text(tokenizer_json())
        kind: Any = transformers.PreTrainedTokenizerFast
        tokenizer = kind(
            tokenizer_file=str(folder / "raw.json"), unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
        )
        tokenizer.save_pretrained(folder)
        return folder

    return make
