"""What a permuted checkpoint stores beside its tensors: the permutation, and what it was made from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ...errors import InputError
from ...files import read_json, sha256_json, validated
from ..decisions import Record, Sha256
from .header import MAX_BYTES

__all__ = ["NAME", "PermutationRecord", "SourceFile", "read_record"]

NAME = "moeplan-permutation.json"
WHAT = "the permutation of a checkpoint"
MAX_RECORD_BYTES = 4 * 2**20  # 100 layers of 1,024 experts and 10,000 files

HeaderBytes = Annotated[int, Field(ge=8, le=MAX_BYTES + 8)]


class SourceFile(Record):
    """A file before the permutation; of tensors, where the first began."""

    sha256: Sha256
    data_start: HeaderBytes | None = None


class PermutationRecord(Record):
    """A permutation with the plan that it is from and the hashes of all source files, in the order of their bytes.

    Parameters
    ----------
    permutation
        For each hidden layer, the old expert that each new one is.
    permutation_sha256
        Of its canonical JSON: another permutation would undo weights trained since to nonsense.
    """

    schema_version: Literal[1] = 1
    moeplan_version: str
    plan_sha256: Sha256
    model: str
    permutation: Mapping[int, tuple[int, ...]]
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
    path = directory / NAME
    if not path.is_file():
        raise InputError(f"{directory}: no {NAME}; expected a checkpoint that moeplan apply --checkpoint wrote")
    found = read_json(path, what=WHAT, max_bytes=MAX_RECORD_BYTES)
    return validated(PermutationRecord, json.dumps(found).encode(), source=str(path), what=WHAT)
