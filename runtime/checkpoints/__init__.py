"""Hugging Face checkpoints with their experts in the order of a plan, and back; no tensor is decoded.

In a permuted checkpoint the new expert s of a layer is the old expert p[s], p the layer's row of the placement. Engines
that cut the experts of a layer into contiguous runs, one a rank, then have the plan's placement without knowing of it.
"""

import os
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from ...errors import MismatchError, UsageError
from ...files import sha256_json, write_json
from ...traces.huggingface.config import spec_of_config
from ..plan import Plan
from .directory import read_directory
from .layout import Layout, survey
from .partial import filling
from .permutation import RECORD, Permutation, PermutationRecord, permutation_of, read_record
from .rewriting import OnProgress, Rewriting

__all__ = ["Permuted", "Restored", "permute", "undo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Permuted:
    """A checkpoint in the order of a plan."""

    directory: Path
    layers: tuple[int, ...]  #: The hidden layers whose experts are in the plan's order
    num_experts: int
    #: Layers of experts that are in no plan, "model.layers.61": those that predict further tokens
    left_alone: tuple[str, ...]
    #: Files that were not copied: weights in another form, whose experts are in the old order
    left_out: tuple[str, ...]
    #: num_files, num_bytes: of the source, what was copied
    num_files: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A checkpoint in its first order again."""

    directory: Path
    #: The files that are not what they were before they were permuted: weights trained since, files added or taken
    #: away. Without any, all is as it was, byte for byte.
    changed: tuple[str, ...]
    left_out: tuple[str, ...]
    num_files: int
    num_bytes: int


def permute(
    plan: Plan,
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    on_progress: OnProgress | None = None,
) -> Permuted:
    """Write a checkpoint again with the experts of each layer in the plan's order.

    The bytes of tensors are copied, none is decoded. The destination appears when all of it is written; the same call
    takes an interrupted one up again.

    Parameters
    ----------
    source
        A directory of config.json and safetensors, as Hugging Face has it.
    on_progress
        Takes the bytes written and those in all.

    Raises
    ------
    UsageError
        No checkpoint can carry the plan out, the source is permuted already, or the destination is there.
    MismatchError
        The plan is of another model.
    InputError
        The source is damaged, or has experts in a form that is not known; nothing is written.
    StorageError
        It cannot be written; where the disk is too small for it, nothing is begun.
    """
    directory = read_directory(source)
    if RECORD in directory.others:
        raise UsageError(f"{source}: permuted already; undo that first: moeplan apply --undo {source} -o DIR")
    model = spec_of_config(directory.path / "config.json")
    permutation = permutation_of(plan, model)
    layout = survey(directory.shard_paths, permutation.old.keys(), permutation.num_experts)
    _check_all_layers(layout, model.num_hidden_layers)
    rewriting = Rewriting(directory, layout, permutation)
    _check_outside(destination, source)
    with filling(destination, rewriting.job) as partial:
        record = PermutationRecord(
            moeplan_version=version("moeplan"),
            plan_sha256=plan.plan_sha256,
            model=plan.model.name,
            permutation=permutation.old,
            permutation_sha256=sha256_json(permutation.old),
            files=rewriting.run(partial, on_progress),
        )
        write_json(partial.path / RECORD, record.model_dump(mode="json"))
    return Permuted(
        directory=Path(destination),
        layers=tuple(permutation.old),
        num_experts=permutation.num_experts,
        left_alone=tuple(sorted(layout.outside)),
        left_out=directory.left_out,
        num_files=len(directory.names),
        num_bytes=directory.num_bytes,
    )


def undo(
    directory: str | os.PathLike[str], destination: str | os.PathLike[str], *, on_progress: OnProgress | None = None
) -> Restored:
    """Write a permuted checkpoint again in the order that it had before, be its weights the same or trained since.

    Parameters
    ----------
    on_progress
        As in `permute`.

    Raises
    ------
    UsageError
        The destination is there.
    InputError
        The directory is damaged, or no checkpoint that was permuted; nothing is written.
    StorageError
        As in `permute`.
    """
    permuted = read_record(Path(directory))
    permuted_files = read_directory(directory)
    permuted_files = replace(permuted_files, others=tuple(name for name in permuted_files.others if name != RECORD))
    permutation = Permutation(permuted.permutation).inverse
    layout = survey(permuted_files.shard_paths, permutation.old.keys(), permutation.num_experts)
    starts = {name: file.data_start for name, file in permuted.files.items() if file.data_start is not None}
    rewriting = Rewriting(permuted_files, layout, permutation, hash_target=True, data_starts=starts)
    _check_outside(destination, directory)
    with filling(destination, rewriting.job) as partial:
        files = rewriting.run(partial, on_progress)
    hashes, before = ({name: file.sha256 for name, file in part.items()} for part in (files, permuted.files))
    return Restored(
        directory=Path(destination),
        changed=tuple(sorted({name for name, _ in hashes.items() ^ before.items()})),
        left_out=permuted_files.left_out,
        num_files=len(permuted_files.names),
        num_bytes=permuted_files.num_bytes,
    )


def _check_outside(destination: str | os.PathLike[str], source: str | os.PathLike[str]) -> None:
    """Refuse a destination inside the source, which would be read as part of it the next time."""
    if Path(os.path.realpath(source)) in Path(os.path.realpath(destination)).parents:
        raise UsageError(f"{destination}: inside {source}, which is read; choose a directory outside of it")


def _check_all_layers(layout: Layout, num_hidden_layers: int | None) -> None:
    """Refuse a model with more layers of experts than the plan is of; those that predict further tokens come after."""
    ours = (name.rpartition(".") for name in layout.outside)
    more = sorted(int(layer) for stem, _, layer in ours if stem == layout.stem)
    if num_hidden_layers is not None and more and more[0] < num_hidden_layers:
        raise MismatchError(
            f"the checkpoint has experts in hidden layer {more[0]}, of which the plan knows nothing;"
            f" it is of layers {', '.join(map(str, layout.blocks))}: expected a plan of this model"
        )
