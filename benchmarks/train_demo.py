"""Training of the embedded model from scratch: `python -m benchmarks.train_demo [-o DIR]`.

Deterministic up to float rounding: where the printed SHA-256 of the text equals the recorded one, the held-out loss
comes out within 3 % of the recorded one.

Legend: B samples; S positions; L layers; E experts; V vocabulary.
"""

import argparse
import hashlib
import math
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from moeplan.errors import MoeplanError
from moeplan.files import atomic_path, write_json
from moeplan.planner.demo.model import ModelConfig, MoELanguageModel
from moeplan.planner.demo.text import other_text, record_text, samples, training_text

__all__ = ["Recipe", "expert_loads", "held_out_loss", "main", "train", "training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the model is trained; a sample is `max_positions` bytes from anywhere in the text."""

    seed: int = 0
    steps: int = 800
    batch_size: int = 16
    peak_learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    balance_weight: float = 0.01


def train(config: ModelConfig, text: str, recipe: Recipe) -> MoELanguageModel:
    """A model trained on `text`, in eval mode, its weights rounded to the float16 that is stored."""
    torch.manual_seed(recipe.seed)
    model = MoELanguageModel(config).train()
    for step, loss in enumerate(training(model, text, recipe)):
        if step % 50 == 0 or step + 1 == recipe.steps:
            print(f"step {step:5}  loss {loss:.4f}  balance {_balance(model):.3f}", file=sys.stderr, flush=True)
    return model.half().float().eval()


def training(model: MoELanguageModel, text: str, recipe: Recipe) -> Iterator[float]:
    """Train a model; the loss of each step, nats, once it is made."""
    rng = np.random.default_rng(recipe.seed)
    data = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=recipe.weight_decay)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, recipe)
        loss = _loss(model, _batch(data, model.config.max_positions + 1, recipe.batch_size, rng))
        optimizer.zero_grad()
        (loss + recipe.balance_weight * _balance(model)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield float(loss.detach())


@torch.inference_mode()
def held_out_loss(model: MoELanguageModel) -> float:
    """Nats a byte on the held-out text, samples of `max_positions`; a sample's first byte is not predicted."""
    length = model.config.max_positions
    tokens_BS = np.concatenate([samples(text, length) for text in (record_text(), other_text())])
    return sum(_loss(model, torch.from_numpy(one)).item() * len(one) for one in _chunks(tokens_BS)) / len(tokens_BS)


@torch.inference_mode()
def expert_loads(model: MoELanguageModel, tokens_BS: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many token-expert pairs each expert gets, `[L, E]`."""
    loads_LE = np.zeros((model.config.num_layers, model.config.num_experts), dtype=np.int64)

    def count(layer: int, _router: nn.Module, _inputs: Any, routed: tuple[Tensor, Tensor]) -> None:
        loads_LE[layer] += np.bincount(routed[1].flatten().numpy(), minlength=model.config.num_experts)

    hooks = [router.register_forward_hook(partial(count, layer)) for layer, router in enumerate(model.routers)]
    for one in _chunks(tokens_BS):
        model(torch.from_numpy(one))
    for hook in hooks:
        hook.remove()
    return loads_LE


def main(arguments: list[str] | None = None) -> None:
    """Train on this Python's documentation; write `model.safetensors` and the record `model.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_demo", description=main.__doc__)
    parser.add_argument("-o", dest="directory", type=Path, default=Path(), help="where to write (default: here)")
    directory: Path = parser.parse_args(arguments).directory
    text, config, recipe = training_text(), ModelConfig(), Recipe()
    text_sha256 = hashlib.sha256(text.encode()).hexdigest()
    print(f"text     {len(text.encode()):,} bytes, SHA-256 {text_sha256}")
    model = train(config, text, recipe)
    loss = held_out_loss(model)
    print(f"held out {loss:.4f} nats, {loss / math.log(2):.3f} bits a byte")
    loads_LE = expert_loads(model, samples(record_text(), config.max_positions))
    print(f"routing  max / mean load {np.round(loads_LE.max(1) / loads_LE.mean(1), 2).tolist()}")
    record = {
        "config": asdict(config),
        "recipe": asdict(recipe),
        "text_sha256": text_sha256,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "held_out_loss": loss,
    }
    try:
        _save(model, directory / "model.safetensors")
        write_json(directory / "model.json", record)
    except MoeplanError as error:
        sys.exit(f"{error}")


def _save(model: MoELanguageModel, path: Path) -> None:
    from safetensors.torch import save

    with atomic_path(path) as temporary:
        temporary.write_bytes(save({name: tensor.half() for name, tensor in model.state_dict().items()}))


def _learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a half cosine to a tenth of the peak."""
    if step < recipe.warmup_steps:
        return recipe.peak_learning_rate * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps)
    return recipe.peak_learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def _batch(data: NDArray[np.int64], length: int, size: int, rng: np.random.Generator) -> Tensor:
    starts_B = rng.integers(len(data) - length + 1, size=size)
    return torch.from_numpy(np.stack([data[start : start + length] for start in starts_B]))


def _loss(model: MoELanguageModel, tokens_BS: Tensor) -> Tensor:
    """Mean cross-entropy of each next byte, nats."""
    logits_BSV = model(tokens_BS[:, :-1])
    return functional.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS[:, 1:].flatten())


def _balance(model: MoELanguageModel) -> Tensor:
    """The mean load-balancing loss of the layers in the last pass."""
    return torch.stack([router.balance_loss for router in model.routers if router.balance_loss is not None]).mean()


def _chunks(tokens_BS: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Runs of at most 16 samples."""
    return [tokens_BS[start : start + 16] for start in range(0, len(tokens_BS), 16)]


if __name__ == "__main__":
    main()
