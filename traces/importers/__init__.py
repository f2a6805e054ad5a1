"""Importers of foreign recordings, one a module, found by the content of the file."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError, MismatchError, UsageError, printable
from ...files import atomic_directory, check_target
from ...workers import SERIAL, Workers
from ..count_form import write_counts
from ..huggingface.config import spec_of_config
from ..model import ModelSpec
from ..part_file import local_directory
from ..schema import PHASES, TraceMeta
from ..writer import TraceWriter
from .model_facts import model_of
from .selection import IMPORTERS, choose
from .source import CountSource, Given, TokenSource
from .tally import Tally

__all__ = ["IMPORTERS", "ImportSummary", "import_trace"]

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """Summary of an import."""

    importer: str  #: Its name in `IMPORTERS`
    is_counts: bool  #: Whether it is counts, not tokens
    destination: str
    model: ModelSpec
    #: Of counts those of every layer by the experts per token; None where these are not known, or layers differ
    num_tokens: int | None
    num_samples: int | None  #: None where samples are unknown
    has_weights: bool
    notes: tuple[str, ...]  #: What was decided or left out on the way, a sentence each


def import_trace(
    source: StrPath | Sequence[StrPath],
    destination: StrPath,
    *,
    hf_config: StrPath | None = None,
    first_step: int | None = None,
    num_experts: int | None = None,
    top_k: int | None = None,
    name: str | None = None,
    phase: str = "decode",
    hidden_size: int | None = None,
    ffn_size: int | None = None,
    kv_size: int | None = None,
    dtype_bytes: int | None = None,
    workers: Workers = SERIAL,
) -> ImportSummary:
    """Turn a foreign recording into a trace; the destination appears whole or not at all.

    Parameters
    ----------
    source
        A file, a directory of files, or several of them that are one recording.
    hf_config
        The config.json of the model: which hidden layers have experts, how many, and what else it says.
    first_step
        Leave out the steps before it: an engine's warm-up, whose tokens are none of its users'.
    num_experts
        Routed experts per layer, where the file does not say; None then takes the largest id + 1, and notes it.
    top_k
        Experts a token, which counts do not say; None then takes 1, and notes it.
    name
        The model's name, by default that of config.json, or of the file.
    phase
        The phase of the tokens that the file does not say it of; recordings of generated text are "decode".
    hidden_size, ffn_size, kv_size, dtype_bytes
        Of the model (see `ModelSpec`), where the file does not say; bytes are predicted only where they are known.
    workers
        Workers that parse the lines of Megatron-LM's files; the trace is the same whichever does.

    Raises
    ------
    InputError
        The file is of no known kind, or damaged, or breaks a rule of traces.
    MismatchError
        The recording and config.json are not of one model.
    UsageError
        The destination is not empty, or an option contradicts the file.
    StorageError
        The destination cannot be written.
    """
    sources = [Path(source)] if isinstance(source, str | os.PathLike) else [Path(path) for path in source]
    if phase not in PHASES:
        raise UsageError(f"phase {phase!r}; expected {', '.join(PHASES)}")
    if not sources:
        raise UsageError("no recording; expected a file or a directory")
    check_target(local_directory(destination), directory=True)
    config = None if hf_config is None else spec_of_config(hf_config)
    asked = {"num_experts": num_experts, "top_k": top_k, "name": name, "hidden_size": hidden_size}
    asked |= {"ffn_size": ffn_size, "dtype_bytes": dtype_bytes, "kv_size": kv_size}
    try:
        chosen = choose(sources)
        opened = chosen.importer.open_source(Given(chosen.files, config, workers))
        model = model_of(opened, config, asked, sources[0].resolve().stem)
        is_known = top_k is not None or "top_k" in opened.model or config is not None
        if first_step is not None and isinstance(opened, CountSource) and opened.step_order == "unknown":
            raise UsageError(f"first step {first_step} asked for; in which order the steps were recorded is unknown")
        tally = Tally(model.num_layers, model.top_k if is_known else None, first_step)
        _write(opened, model, chosen.name, local_directory(destination), phase, tally)
    except (InputError, MismatchError) as error:
        where = str(sources[0]) + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")
        reason = str(error).removeprefix(f"{where}: ").removeprefix(f"{sources[0].name}: ")
        raise type(error)(f"{where}: {reason}") from error
    return ImportSummary(
        importer=chosen.name,
        is_counts=isinstance(opened, CountSource),
        destination=str(destination),
        model=model,
        num_tokens=tally.num_tokens,
        num_samples=tally.num_samples,
        has_weights=opened.has_weights,
        notes=tuple(printable(note) for note in (*chosen.notes, *opened.notes, *tally.notes)),  # they quote the file
    )


def _write(
    source: TokenSource | CountSource, model: ModelSpec, importer: str, destination: Path, phase: str, tally: Tally
) -> None:
    recorder = f"import {importer}"
    if isinstance(source, CountSource):
        meta = TraceMeta(form="counts", model=model, recorder=recorder, step_order=source.step_order)
        write_counts(destination, meta, tally.of_counts(source.tables(model.num_experts)))
        return
    meta = TraceMeta(form="tokens", model=model, recorder=recorder, choice_order=source.choice_order)
    with atomic_directory(destination) as directory, TraceWriter(directory, meta, weights=source.has_weights) as writer:
        for batch in tally.of_tokens(source.batches(phase), may_be_counts=source.may_be_counts):
            writer.append(batch)
