"""Importers of foreign recordings, one a module, found by the content of the file."""

import dataclasses
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from ...errors import InputError, UsageError
from ...files import atomic_directory, size_of
from ..model import Attention, ModelSpec
from ..schema import PHASES, TraceMeta
from ..writer import TraceWriter
from .source import Importer, Source

__all__ = ["IMPORTERS", "ImportSummary", "import_trace"]

IMPORTERS = {
    "numpy": ".numpy_arrays",
}
HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """What was imported.

    Parameters
    ----------
    importer
        Its name in `IMPORTERS`.
    notes
        What was decided or left out on the way, a sentence each.
    """

    importer: str
    destination: str
    model: ModelSpec
    num_tokens: int
    has_weights: bool
    notes: tuple[str, ...]


def import_trace(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    num_experts: int | None = None,
    name: str | None = None,
    phase: str = "decode",
    hidden_size: int | None = None,
    kv_size: int | None = None,
    dtype_bytes: int | None = None,
) -> ImportSummary:
    """Turn a foreign recording into a trace; the destination appears whole or not at all.

    Parameters
    ----------
    num_experts
        Routed experts a layer, where the file does not say; None then takes the largest id + 1, and notes it.
    name
        The model's name, by default the name of the file.
    phase
        The phase of all its tokens, which such files do not say; recordings of generated text are "decode".
    hidden_size, kv_size, dtype_bytes
        Of the model (see `ModelSpec`), which such files do not say; bytes are predicted only where they are known.

    Raises
    ------
    InputError
        The file is of no known kind, or damaged, or breaks a rule of traces.
    UsageError
        The destination is not empty, or an option contradicts the file.
    StorageError
        The destination cannot be written.
    """
    source = Path(source)
    if phase not in PHASES:
        raise UsageError(f"phase {phase!r}; expected {', '.join(PHASES)}")
    size_of(source, what="a recording")
    try:
        importer = _importer_of(source)
        opened = cast(Importer, import_module(IMPORTERS[importer], __package__)).open_source(source)
        model = dataclasses.replace(
            _model_of(opened, num_experts, name or source.stem),
            hidden_size=hidden_size,
            dtype_bytes=dtype_bytes,
            attention=Attention(kv_size=kv_size),
        )
        meta = TraceMeta(form="tokens", model=model, recorder=f"import {importer}")
        with (
            atomic_directory(destination) as directory,
            TraceWriter(directory, meta, weights=opened.has_weights) as writer,
        ):
            for batch in opened.batches(phase):
                writer.append(batch)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    return ImportSummary(importer, str(destination), model, writer.num_tokens, opened.has_weights, tuple(opened.notes))


def _importer_of(source: Path) -> str:
    try:
        with source.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})") from error
    for name, module in IMPORTERS.items():
        if cast(Importer, import_module(module, __package__)).recognises(head):
            return name
    raise InputError(f"begins with {head[:8]!r}, of no kind that can be imported; known: {', '.join(IMPORTERS)}")


def _model_of(source: Source, num_experts: int | None, name: str) -> ModelSpec:
    if source.num_experts is not None and num_experts not in (None, source.num_experts):
        raise UsageError(f"{num_experts} experts asked for; the file says {source.num_experts}")
    experts = num_experts or source.num_experts
    if experts is None:
        experts = source.largest_id() + 1
        source.notes.append(f"the file does not say how many experts there are: {experts} taken, the largest id + 1")
    return ModelSpec(name=name, layer_ids=tuple(range(source.num_layers)), num_experts=experts, top_k=source.top_k)
