"""The hidden states recorded beside a trace, layer by layer, joined with its tokens.

Legend: T tokens; M hidden size.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, MismatchError, UsageError
from .reader import Trace

KEYS = ("sample", "step", "position")  # what tells a token apart
MAX_LAYER_BYTES = 8 * 2**30
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Files `embeddings-*.safetensors` beside a trace (`recording.embeddings`); one layer is read at a time."""

    files: tuple[Path, ...]
    tokens: NDArray[np.void]  #: The tokens of all files by `KEYS`, in their order
    keys: tuple[str, ...]  #: Those of `KEYS` that were recorded

    @classmethod
    def beside(cls, trace: Trace) -> Self | None:
        """Open the hidden states beside a trace; None where there are none.

        Raises
        ------
        UsageError
            The hidden states do not fit into memory.
        InputError
            A file is damaged, or lacks a layer.
        MismatchError
            The hidden states are of another model.
        """
        folder = Path(trace.path)
        files = tuple(sorted(folder.glob("embeddings-*.safetensors"))) if folder.is_dir() else ()
        if not files:
            return None
        shapes, columns = dict[tuple[Path, str], tuple[int, ...]](), list[dict[str, NDArray[Any]]]()
        for path in files:
            with _opened(path) as stored:
                slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
                _check_tensors(path, {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()})
                shapes |= {(path, name): tuple(part.get_shape()) for name, part in slices.items()}
                columns.append({name: stored.get_tensor(name) for name in KEYS if name in slices})
        known = tuple(name for name in KEYS if name in columns[0])
        widths = {shape[1] for (_, name), shape in shapes.items() if name.startswith("layer_")}
        expected = {f"layer_{layer}" for layer in range(trace.model.num_layers)}
        for path in files:
            names = {name for file, name in shapes if file == path}
            if more := {name for name in names if name.startswith("layer_")} - expected:
                raise MismatchError(
                    f"{path}: {min(more)} of a model of {trace.model.num_layers} MoE layers; expected the hidden states"
                    " of this trace's model"
                )
            if lacking := sorted(expected - names) or sorted({*known, "position"} - names):
                raise InputError(f"{path}: no {lacking[0]}; record with --embeddings all")
        if len(widths) != 1 or trace.model.hidden_size not in (None, *widths):
            raise MismatchError(
                f"{folder}: hidden states of {' and '.join(map(str, sorted(widths)))} elements, those of"
                f" {trace.model.name} have {trace.model.hidden_size}; they are of another model"
            )
        key_T = _keys_of({name: np.concatenate([part[name] for part in columns]) for name in known})
        (width,) = widths
        if 2 * width * len(key_T) > MAX_LAYER_BYTES:
            raise UsageError(f"{folder}: {len(key_T):,} hidden states of {width:,} elements; expected at most 8 GiB")
        return cls(files, key_T, known)

    def places(self, wanted: dict[str, NDArray[Any]]) -> Ints:
        """The place of each wanted token among `tokens`; MismatchError unless each is there exactly once."""
        sought_T = _keys_of({name: wanted[name] for name in self.keys})
        order = np.argsort(self.tokens)
        ordered = self.tokens[order]
        at_T = np.minimum(np.searchsorted(ordered, sought_T), max(len(ordered) - 1, 0))
        if not len(ordered) or (ordered[at_T] != sought_T).any() or (ordered[1:] == ordered[:-1]).any():
            raise MismatchError(
                f"{self.files[0].parent}: hidden states of other tokens than the trace's; expected each token of it"
                " once: record them together"
            )
        return np.asarray(order[at_T], np.int64)

    def layer(self, layer: int, places: Ints) -> NDArray[np.float16]:
        """Inputs of an MoE layer, of the tokens at these places, `[T, M]`; InputError where they are not finite."""
        parts = []
        for path in self.files:
            with _opened(path) as stored:
                parts.append(stored.get_tensor(f"layer_{layer}"))
        x_TM: NDArray[np.float16] = np.concatenate(parts)[places]
        if not np.isfinite(x_TM).all():
            raise InputError(f"{self.files[0].parent}: hidden states of layer {layer} that are not finite numbers")
        return x_TM


def _check_tensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Refuse tensors of a file, by name their type and shape, that are not one row for each token."""
    tokens = tensors.get("position", ("", [0]))[1][:1]
    for name, (kind, shape) in tensors.items():
        if not (layer := name.startswith("layer_")) and name not in KEYS:
            continue
        number, axes = ("F", 2) if layer else ("I", 1)  # as safetensors names types: F16, I64
        if shape[:1] != tokens or len(shape) != axes or kind[0] != number:
            what = f"numbers [{tokens[0]}, hidden size] of floating point" if layer else f"whole numbers {tokens}"
            raise InputError(f"{path}: {name} is {kind} {shape}; expected {what}, a row a token: record it again")


def _keys_of(columns: dict[str, NDArray[Any]]) -> NDArray[np.void]:
    """One sortable record per token, of these columns."""
    kind = np.dtype([(name, np.int64) for name in columns])
    key_T = np.empty(len(next(iter(columns.values()))), kind)
    for name, column in columns.items():
        key_T[name] = column
    return key_T


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: no hidden states in safetensors ({str(error)[:80]})") from error
