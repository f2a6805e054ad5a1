"""Importers of foreign recordings, one a module, found by the content of the file."""

import codecs
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from ...errors import InputError, UsageError, printable
from ...files import atomic_directory, canonical_json, size_of, validated
from ..count_form import write_counts
from ..model import ModelSpec
from ..part_file import local_directory
from ..schema import PHASES, TraceMeta
from ..writer import TraceWriter
from .source import CountSource, Importer, Source
from .tally import Tally

__all__ = ["IMPORTERS", "ImportSummary", "import_trace"]

IMPORTERS = {
    "numpy": ".numpy_arrays",
    "json_lines": ".json_lines",
    "csv": ".csv_counts",
}
HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """What was imported.

    Parameters
    ----------
    importer
        Its name in `IMPORTERS`.
    is_counts
        Whether it is counts, not tokens.
    num_tokens
        Of counts those of every layer by the experts a token; None where these are not known, or layers differ.
    num_samples
        None where samples are unknown.
    notes
        What was decided or left out on the way, a sentence each.
    """

    importer: str
    is_counts: bool
    destination: str
    model: ModelSpec
    num_tokens: int | None
    num_samples: int | None
    has_weights: bool
    notes: tuple[str, ...]


def import_trace(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    num_experts: int | None = None,
    top_k: int | None = None,
    name: str | None = None,
    phase: str = "decode",
    hidden_size: int | None = None,
    ffn_size: int | None = None,
    kv_size: int | None = None,
    dtype_bytes: int | None = None,
) -> ImportSummary:
    """Turn a foreign recording into a trace; the destination appears whole or not at all.

    Parameters
    ----------
    num_experts
        Routed experts a layer, where the file does not say; None then takes the largest id + 1, and notes it.
    top_k
        Experts a token, which counts do not say; None then takes 1, and notes it.
    name
        The model's name, by default the name of the file.
    phase
        The phase of the tokens that the file does not say it of; recordings of generated text are "decode".
    hidden_size, ffn_size, kv_size, dtype_bytes
        Of the model (see `ModelSpec`), where the file does not say; bytes are predicted only where they are known.

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
        sizes = {"hidden_size": hidden_size, "ffn_size": ffn_size, "dtype_bytes": dtype_bytes, "kv_size": kv_size}
        model = _model_of(opened, {"num_experts": num_experts, "top_k": top_k, "name": name, **sizes}, source.stem)
        is_known = top_k is not None or "top_k" in opened.model
        tally = Tally(model.num_layers, model.top_k if is_known else None)
        _write(opened, model, importer, local_directory(destination), phase, tally)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    is_counts = isinstance(opened, CountSource)
    has_weights = not isinstance(opened, CountSource) and opened.has_weights
    notes = tuple(printable(note) for note in opened.notes)  # they quote the file
    return ImportSummary(
        importer, is_counts, str(destination), model, tally.num_tokens, tally.num_samples, has_weights, notes
    )


def _write(
    source: Source | CountSource, model: ModelSpec, importer: str, destination: Path, phase: str, tally: Tally
) -> None:
    recorder = f"import {importer}"
    if isinstance(source, CountSource):
        meta = TraceMeta(form="counts", model=model, recorder=recorder)
        write_counts(destination, meta, map(tally.of_counts, source.tables(model.num_experts)))
        return
    meta = TraceMeta(form="tokens", model=model, recorder=recorder)
    with atomic_directory(destination) as directory, TraceWriter(directory, meta, weights=source.has_weights) as writer:
        for batch in source.batches(phase):
            writer.append(tally.of_tokens(batch))


def _importer_of(source: Path) -> str:
    try:
        with source.open("rb") as stream:
            head = stream.read(HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})") from error
    for name, module in IMPORTERS.items():
        if cast(Importer, import_module(module, __package__)).recognises(head):
            return name
    raise InputError(f"begins with {head[:8]!r}, of no kind that can be imported; known: {', '.join(IMPORTERS)}")


class _Model(BaseModel):
    """A model, for pydantic to check what a file says of it."""

    model: ModelSpec


def _model_of(source: Source | CountSource, asked: dict[str, Any], stem: str) -> ModelSpec:
    """What the file says of the model and what was asked for, which may not contradict it."""
    attention = source.model.get("attention", {})
    facts = {**source.model, "kv_size": attention.get("kv_size")}
    for key, value in asked.items():
        found = facts.get(key)
        if key != "name" and value is not None and found not in (None, value):
            raise UsageError(f"{key} {value} asked for; the file says {found}")
        facts[key] = found if value is None else value
    if facts["num_experts"] is None:
        facts["num_experts"] = source.largest_id() + 1
        taken = f"{facts['num_experts']} taken, the largest id + 1"
        source.notes.append(f"the file does not say how many experts there are: {taken}")
    if facts["top_k"] is None:
        facts["top_k"] = 1
        source.notes.append("the file does not say how many experts a token goes to: 1 taken")
    facts["attention"] = {**attention, "kv_size": facts.pop("kv_size")}
    facts["name"] = facts["name"] or stem
    return validated(_Model, canonical_json({"model": facts}), source="model", what="a model").model
