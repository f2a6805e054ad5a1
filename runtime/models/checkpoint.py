"""The weights of a model from one safetensors checkpoint, of the experts only those that a rank holds.

A checkpoint names its tensors as the model does, or, of experts, one by one as the Hugging Face hub does.

Legend: E experts; n experts held here.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError, UsageError
from ...files import size_of
from ..checkpoints.directory import INDEX, SINGLE, indexed

WHAT = "a safetensors checkpoint"
FLOATS = ("F64", "F32", "F16", "BF16")
ELSEWHERE = (".mlp.", ".block_sparse_moe.")  # a block's name in transformers, and in Mixtral's checkpoints
PARTS = {  # a stacked parameter: the tensors of one expert that make up its row, either way they are called
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


def read_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    held: Mapping[str, Sequence[int]],
    *,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Tensors of a checkpoint by the names of a model's state; of the experts only the rows held here are read.

    The model may be built under `torch.device("meta")`: nothing is then allocated that is not kept.

    Parameters
    ----------
    path
        A directory with `model.safetensors`, or its index and shards; or one safetensors file.
    held
        For the name of each module of stacked experts, "model.layers.0.mlp.experts", the experts that its parameters
        `[E, ...]` keep, in this order: they become `[n, ...]`.
    device
        Where parameters on the meta device go; others stay where they are.

    Raises
    ------
    InputError
        The checkpoint is damaged, or lacks a tensor, or has it in another shape, quantised or not finite.
    """
    tensors = _Tensors(Path(path))
    by_identity: dict[int, list[str]] = {}
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in state.items():  # tied weights have several names, of which a checkpoint needs one
        by_identity.setdefault(id(tensor), []).append(name)
    filled: dict[str, Tensor] = {}
    for names in by_identity.values():
        target = state[names[0]]
        rows = held.get(names[0].rpartition(".")[0])
        loaded = tensors.whole(names, target) if rows is None else tensors.rows(names[0], target, rows)
        loaded = loaded.to(device if target.is_meta else target.device, target.dtype)
        if loaded.is_floating_point() and not loaded.isfinite().all():
            raise InputError(f"{path}: {names[0]} has numbers beyond {target.dtype}; make the model in a wider type")
        if isinstance(target, nn.Parameter):
            loaded = nn.Parameter(loaded, requires_grad=target.requires_grad)
        filled |= dict.fromkeys(names, loaded)
    return filled


def fill_model(model: nn.Module, filled: Mapping[str, Tensor], device: torch.device | str) -> None:
    """Put the tensors read in the place of a model's parameters and buffers.

    Raises
    ------
    UsageError
        A buffer on the meta device is in no checkpoint, and its module cannot be made again.
    """
    for name, tensor in filled.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, tensor)
    _make_buffers(model, device)


class _Tensors:
    """The tensors of a checkpoint by name; files are opened when a tensor is asked for, and mapped, not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: dict[Path, Any] = {}
        if not path.is_dir():
            self.file_of = dict.fromkeys(self._open(path).keys(), path)
        elif (path / SINGLE).exists() or not (path / INDEX).exists():
            self.file_of = dict.fromkeys(self._open(path / SINGLE).keys(), path / SINGLE)
        else:
            self.file_of = {name: path / file for name, file in indexed(path / INDEX).items()}

    def whole(self, names: list[str], target: Tensor) -> Tensor:
        """The tensor under one of these names, of the target's shape."""
        spelled = [name for mine in names for name in _spellings(mine) if name in self.file_of]
        if not spelled:
            raise self._missing(names[0])
        return self._finite(spelled[0], self._slice(spelled[0], target.shape)[...]).clone()  # from the mapped file

    def rows(self, name: str, target: Tensor, held: Sequence[int]) -> Tensor:
        """Rows of a stacked tensor, `[n, ...]`, or the experts' own tensors stacked."""
        for stacked in _spellings(name):
            if stacked in self.file_of:
                rows = self._slice(stacked, target.shape)
                return _stack([self._finite(stacked, rows[expert]) for expert in held], target)
        return _stack([self._expert(name, expert, target.shape[1:]) for expert in held], target)

    def _expert(self, name: str, expert: int, shape: torch.Size) -> Tensor:
        """A row of a stacked tensor from the tensors of that expert."""
        module, _, leaf = name.rpartition(".")
        for parts in PARTS.get(leaf, ()):
            for prefix in _spellings(module + "."):
                names = [f"{prefix}{expert}.{part}.weight" for part in parts]
                if all(part in self.file_of for part in names):
                    size = torch.Size([shape[0] // len(parts), *shape[1:]])
                    return torch.cat([self._finite(part, self._slice(part, size)[...]) for part in names])
        raise self._missing(f"{name} or that of expert {expert}")

    def _slice(self, name: str, shape: Sequence[int]) -> Any:
        """A reader of parts of a tensor, once its header says that it is of this shape and of floating point."""
        file = self.file_of[name]
        with _refusing(file):
            view = self._open(file).get_slice(name)
        if view.get_shape() != list(shape) or view.get_dtype() not in FLOATS:
            raise InputError(
                f"{file}: {name} is {view.get_dtype()} {view.get_shape()}; the model has {list(shape)} of"
                f" {', '.join(FLOATS)}"
            )
        return view

    def _finite(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.isfinite().all():
            raise InputError(f"{self.file_of[name]}: {name} holds numbers that are not finite; expected weights")
        return tensor

    def _missing(self, what: str) -> InputError:
        return InputError(f"{self.path}: no {what} among {len(self.file_of)} tensors; expected those of this model")

    def _open(self, file: Path) -> Any:
        from safetensors import safe_open

        if file not in self.opened:
            size_of(file, what=WHAT)
            with _refusing(file):
                self.opened[file] = safe_open(file, framework="pt")
        return self.opened[file]


def _spellings(name: str) -> tuple[str, str]:
    return name, name.replace(*ELSEWHERE)


def _stack(rows: list[Tensor], target: Tensor) -> Tensor:
    return torch.stack(rows) if rows else torch.empty(0, *target.shape[1:], dtype=target.dtype)


def _make_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Make the buffers that no checkpoint holds (rotary frequencies), by building their modules again."""
    for path, module in model.named_modules():
        absent = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        if not absent:
            continue
        if not hasattr(module, "config"):
            raise UsageError(f"buffer {path}.{min(absent)} is on the meta device and in no checkpoint; make it there")
        fresh = type(module)(module.config)
        for name, buffer in absent.items():
            setattr(module, name, fresh.get_buffer(name).to(device, buffer.dtype))


@contextmanager
def _refusing(file: Path) -> Iterator[None]:
    """Raise the faults that safetensors finds in a file as one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: damaged ({str(error)[:160]}); expected {WHAT}") from error
