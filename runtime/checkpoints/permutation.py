"""The order of the experts of every MoE layer: from a plan, reversed, and as a permuted checkpoint records it.

Legend: E experts per layer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from ...errors import InputError, MismatchError, UsageError
from ...files import read_json, sha256_json, validated
from ...solvers.placement import keeps_groups_whole
from ...traces.model import ModelSpec
from ..decisions import Record, Sha256
from ..plan import Plan
from .header import MAX_BYTES

RECORD = "moeplan-permutation.json"
WHAT = "the permutation of a checkpoint"
MAX_RECORD_BYTES = 4 * 2**20  # 100 layers of 1,024 experts and 10,000 files

HeaderBytes = Annotated[int, Field(ge=8, le=MAX_BYTES + 8)]


@dataclass(frozen=True)
class Permutation:
    """Order of experts: new expert s of hidden layer i is old expert `old[i][s]`, E numbers, each once."""

    old: Mapping[int, tuple[int, ...]]

    @property
    def num_experts(self) -> int:
        """Number of experts per layer, E."""
        return len(next(iter(self.old.values())))

    @cached_property
    def new(self) -> dict[int, tuple[int, ...]]:
        """Inverse table: old expert e of hidden layer i becomes new expert `new[i][e]`."""
        return {layer: tuple(np.argsort(old_E).tolist()) for layer, old_E in self.old.items()}

    @property
    def inverse(self) -> "Permutation":
        """The permutation that undoes this one."""
        return Permutation(self.new)


def permutation_of(plan: Plan, model: ModelSpec) -> Permutation:
    """The permutation that gives the experts of a checkpoint's `model` the plan's order.

    Raises
    ------
    UsageError
        The plan decides no placement, or one that no order of experts expresses: replicas, devices with unequal
        numbers of slots, or groups of experts torn apart where the model chooses among groups first.
    MismatchError
        The plan is of another number of experts.
    """
    placement = plan.placement
    if placement is None:
        raise UsageError("the plan decides no placement; expected one: moeplan solve --strategy exflow or eplb")
    if placement.has_replicas:
        raise UsageError(
            f"the plan has {placement.num_slots} slots per layer for {placement.num_experts} experts; a checkpoint"
            f" holds every expert once: re-run moeplan solve without --redundant and --slots, for devices that divide"
            f" {placement.num_experts}"
        )
    if len(set(placement.slots.tolist())) > 1:
        raise UsageError(
            f"the plan gives devices {placement.slots.min()} to {placement.slots.max()} slots; engines cut a"
            " checkpoint's experts into equal runs: re-run moeplan solve without --slots and --dead"
        )
    if plan.model.num_experts != model.num_experts:
        raise MismatchError(
            f"the plan is of {plan.model.num_experts} experts per layer, the checkpoint has {model.num_experts};"
            " expected the model that the plan's trace was recorded of"
        )
    limited = next((spec for spec in (model, plan.model) if spec.top_k_groups and spec.num_expert_groups), None)
    if limited is not None and not keeps_groups_whole(placement, limited.num_expert_groups or 1):
        raise UsageError(
            f"the plan tears groups of experts apart, and {limited.name} chooses {limited.top_k_groups} of"
            f" {limited.num_expert_groups} groups by where they lie: re-run moeplan solve --groups whole"
        )
    rows = placement.physical_to_logical.tolist()
    return Permutation({layer: tuple(row) for layer, row in zip(plan.model.layer_ids, rows, strict=True)})


class SourceFile(Record):
    """A file before the permutation; of tensors, where the first began."""

    sha256: Sha256
    data_start: HeaderBytes | None = None


class PermutationRecord(Record):
    """A permutation with the plan that it is from and the hashes of all source files, in the order of their bytes."""

    schema_version: Literal[1] = 1
    moeplan_version: str
    plan_sha256: Sha256
    model: str
    permutation: Mapping[int, tuple[int, ...]]  #: For each hidden layer, the old expert that each new one is
    #: Of its canonical JSON: another permutation would undo weights trained since to nonsense
    permutation_sha256: Sha256
    files: Mapping[str, SourceFile]

    @model_validator(mode="after")
    def _permutes(self) -> Self:
        lengths = {len(row) for row in self.permutation.values()}
        if len(lengths) != 1:
            raise InputError(f"{len(self.permutation)} layers of {sorted(lengths)} experts; expected one number")
        for layer, row in self.permutation.items():
            if sorted(row) != list(range(len(row))):
                raise InputError(f"layer {layer} is no permutation of {len(row)} experts")
        if self.permutation_sha256 != sha256_json(dict(self.permutation)):
            raise InputError("the permutation was changed, its hash is another; expected it as it was written")
        return self


def read_record(directory: Path) -> PermutationRecord:
    """The record in a permuted checkpoint.

    Raises
    ------
    InputError
        There is none, or it is damaged.
    """
    path = directory / RECORD
    if not path.is_file():
        raise InputError(f"{directory}: no {RECORD}; expected a checkpoint that moeplan apply --checkpoint wrote")
    written = read_json(path, what=WHAT, max_bytes=MAX_RECORD_BYTES)
    return validated(PermutationRecord, json.dumps(written).encode(), source=str(path), what=WHAT)
