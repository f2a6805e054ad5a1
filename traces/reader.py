"""The reader of a token trace: batches of the layers and phases asked for.

Legend: T tokens; L' layers asked for; K experts per token.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, UsageError
from .dataset import Dataset
from .model import ModelSpec
from .schema import PHASES, TokenBatch, check_tokens, refusing

if TYPE_CHECKING:
    import pyarrow as pa

SCALARS = ("step", "sample", "position", "source_rank", "phase")
SCALAR_BYTES = 24
KEPT_BYTES = 32 * 2**20  # of columns that stay in memory


@dataclass(frozen=True)
class Trace(Dataset):
    """A token trace on disk, one row a token; see `Dataset` for its attributes."""

    form: ClassVar[str] = "tokens"

    @property
    def model(self) -> ModelSpec:
        """The model whose routing this is."""
        return self.meta.model

    @property
    def num_tokens(self) -> int:
        """Tokens of all phases."""
        return self.num_rows

    def check_first_choices(self, what: str) -> None:
        """Refuse the trace for what follows a token's first expert, where none of several is known to be the first."""
        if self.meta.choice_order == "unknown" and self.model.top_k > 1:
            raise UsageError(
                f"{self.path}: a token's experts were not recorded in the order of their gates; {what} needs to know"
                " the first: record again, or give --dispatch standard"
            )

    def batches(
        self,
        layers: Sequence[int] | None = None,
        *,
        phases: Collection[str] | None = None,
        weights: bool = False,
        may_lack: bool = False,
    ) -> Iterator[TokenBatch]:
        """The tokens in order, a bounded batch at a time; only the columns asked for are read.

        Columns that take no more than `KEPT_BYTES` are kept, and read once: batches are not to be written to.

        Parameters
        ----------
        layers
            Ordinals of the layers in `ids`, in this order; None: all; empty: scalar columns only, ids `[T, 0, K]`.
        phases
            Only tokens of these phases; None: all. A row's number (`split.units`) is its number among the tokens that
            come out, so a split by blocks holds for one choice of phases.
        weights
            Read the gate weights too.
        may_lack
            Let there be no token of these phases.

        Raises
        ------
        UsageError
            A layer or phase that there is not, no token of these phases, or weights that were not recorded.
        InputError
            A part is damaged or breaks a rule.
        """
        chosen = range(self.model.num_layers) if layers is None else layers
        self._check_request(chosen, phases, weights)
        wanted = None if phases is None else np.array([phase in phases for phase in PHASES])
        columns = [*SCALARS, *(f"layer_{layer}" for layer in chosen)]
        columns += [f"weight_{layer}" for layer in chosen] if weights else []
        row_bytes = SCALAR_BYTES + len(chosen) * self.model.top_k * (4 if weights else 2)
        batches: Iterable[TokenBatch] | None = self._kept.get(tuple(columns))
        if batches is None:
            batches = self._read(columns, row_bytes, chosen, weights)
            if self.num_rows * row_bytes <= KEPT_BYTES:
                batches = self._kept[tuple(columns)] = list(batches)
        has_tokens = may_lack
        for batch in batches:
            chosen_batch = batch if wanted is None else batch.select(wanted[batch.phase])
            if len(chosen_batch):
                has_tokens = True
                yield chosen_batch
        if not has_tokens:
            raise self.lacking(phases)

    def lacking(self, phases: Collection[str] | None) -> UsageError:
        """Error to raise where there is no token of these phases."""
        return UsageError(f"{self.path}: no token of phase {', '.join(phases or PHASES)}")

    @cached_property
    def _kept(self) -> dict[tuple[str, ...], list[TokenBatch]]:
        """The batches of columns that were read, of a small trace."""
        return {}

    def _read(
        self, columns: Sequence[str], row_bytes: int, layers: Sequence[int], weights: bool
    ) -> Iterator[TokenBatch]:
        """The tokens of all phases, from the files."""
        for path, first_row, arrow in self.read(columns, row_bytes):
            with refusing(path):
                batch = self._decode(arrow, layers, weights)
                check_tokens(batch, self.model.num_experts, first_row)
            yield batch

    def _check_request(self, layers: Sequence[int], phases: Collection[str] | None, weights: bool) -> None:
        if unknown := [layer for layer in layers if not 0 <= layer < self.model.num_layers]:
            raise UsageError(f"layers {unknown}; {self.path} has layers 0 to {self.model.num_layers - 1}")
        if unknown_phases := set(phases or ()) - set(PHASES):
            raise UsageError(f"phases {sorted(unknown_phases)}; expected some of {', '.join(PHASES)}")
        if weights and not self.has_weights:
            raise UsageError(f"{self.path}: gate weights were not recorded; record or import with weights")

    def _decode(self, arrow: "pa.RecordBatch", layers: Sequence[int], weights: bool) -> TokenBatch:
        scalars = {name: self._scalar(arrow, name) for name in SCALARS if name != "phase"}
        position = scalars.pop("position")
        assert position is not None
        return TokenBatch(
            **scalars,
            position=position,
            phase=_phase(arrow.column("phase")),
            ids=self._cells(arrow, "layer", layers, np.uint16),
            weights=self._cells(arrow, "weight", layers, np.float16) if weights else None,
        )

    def _scalar(self, arrow: "pa.RecordBatch", name: str) -> NDArray[Any] | None:
        column = arrow.column(name)
        if name in self.known or name == "position":
            if column.null_count:
                raise InputError(f"column {name} has nulls in places; expected none")
            return np.asarray(column.to_numpy())
        if column.null_count != len(column):
            raise InputError(f"column {name} is filled in places; expected in all rows of all parts or in none")
        return None

    def _cells(
        self, arrow: "pa.RecordBatch", prefix: str, layers: Sequence[int], kind: type[np.generic]
    ) -> NDArray[Any]:
        """`[T, L', K]`, contiguous by layer."""
        cells_LTK = np.empty((len(layers), arrow.num_rows, self.model.top_k), dtype=kind)
        for cells_TK, layer in zip(cells_LTK, layers, strict=True):
            column = arrow.column(f"{prefix}_{layer}")
            values = column.flatten()
            if column.null_count or values.null_count:
                raise InputError(f"column {prefix}_{layer} has nulls; expected none")
            cells_TK[:] = values.to_numpy().reshape(cells_TK.shape)
        return cells_LTK.transpose(1, 0, 2)


def open_trace(path: str | os.PathLike[str]) -> Trace:
    """The token trace in a directory, a Parquet file, or at a URI that pyarrow opens.

    Raises
    ------
    InputError
        There is none, it is damaged, it has no tokens, or it is in count form.
    MismatchError
        Its parts do not belong together.
    """
    return Trace.open(path)


def _phase(column: Any) -> NDArray[np.int8]:
    """Indices into `PHASES`, whatever order the file's own dictionary has."""
    if column.null_count:
        raise InputError("column phase has nulls; expected none")
    names = column.dictionary.to_pylist()
    if unknown := [name for name in names if name not in PHASES]:
        raise InputError(f"phase {str(unknown[0])[:40]!r}; expected one of {', '.join(PHASES)}")
    index_of_name = np.array([PHASES.index(name) for name in names], dtype=np.int8)
    return np.asarray(index_of_name[column.indices.to_numpy()])
