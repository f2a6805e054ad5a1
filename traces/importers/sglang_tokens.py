"""SGLang's tokens by forward pass: each rank's choices by physical expert, -1 where there is none.

Legend: H hidden layers; L MoE layers; T tokens of a record; K experts a token; C columns that the recorder keeps.
"""

import hashlib
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, MismatchError
from ..model import NOT_ROUTED, ModelSpec
from ..schema import PHASES, TokenBatch
from .cells import UNORDERED
from .hidden_layers import check_routed, with_experts
from .sglang_records import FOLDED, Record, Records
from .source import BLOCK_BYTES, TokenSource, first_of_each
from .torch_file import integers

__all__ = ["TokensSource"]

PHASE_OF_MODE = {1: "prefill", 2: "decode"}  # SGLang's ForwardMode; in others both occur


class TokensSource(TokenSource):
    """Tokens of all ranks' records."""

    def __init__(self, records: Records, model: ModelSpec | None) -> None:
        self._records, self._model = records, model
        self._layers = with_experts(len(records.physical_to_logical), model)
        self._ranks, notes = first_of_each((rank, self._digest(rank)) for rank in records.by_rank)
        top_k, columns = self._width()
        if model is not None and not top_k <= model.top_k <= columns:
            raise MismatchError(
                f"{top_k} experts a token in {columns} columns; config.json says {model.top_k} (SGLang records 8 at"
                " most, and with shared experts fused one too many)"
            )
        self._top_k = top_k if model is None else model.top_k
        self.model = {"layer_ids": self._layers, "top_k": self._top_k, "num_experts": records.num_experts}
        self.notes = [*notes, FOLDED, "no request identity: samples are unknown", UNORDERED]

    def batches(self, phase: str) -> Iterator[TokenBatch]:
        """The tokens by pass and rank."""
        filled_H = np.zeros(len(self._records.physical_to_logical), np.bool_)
        untold, rows = 0, max(1, BLOCK_BYTES // (8 * len(self._layers) * self._top_k))
        for step, rank, record, whole_HTC in self._chosen():
            position_T = _positions(record, whole_HTC.shape[1])
            mode = record.get("forward_mode")
            told = PHASE_OF_MODE.get(mode) if isinstance(mode, int) else None
            untold += 0 if told else len(position_T)
            for first in range(0, len(position_T), rows):
                ids_HTC = whole_HTC[:, first : first + rows]
                count = ids_HTC.shape[1]
                filled_H |= (ids_HTC > 0).any(axis=(1, 2))
                yield TokenBatch(
                    step=np.full(count, step, np.int32),
                    sample=None,
                    position=position_T[first : first + rows],
                    source_rank=np.full(count, rank, np.int32),
                    phase=np.full(count, PHASES.index(told or phase), np.int8),
                    ids=self._logical(ids_HTC),
                )
        check_routed(filled_H, self._model)
        if untold:
            self.notes.append(f"{untold:,} tokens of passes neither prefill nor decode taken as {phase}")

    def _chosen(self) -> Iterator[tuple[int, int, Record, NDArray[Any]]]:
        """The records with tokens and their physical experts `[H, T, C]`, by pass and rank."""
        by_rank = self._records.by_rank
        steps = sorted(set[int]().union(*by_rank.values()))
        for step, rank in product(steps, self._ranks):
            if record := by_rank[rank].get(step):
                ids_HTC = self._ids(record, step, rank)
                if ids_HTC.shape[1]:
                    yield step, rank, record, ids_HTC

    def _ids(self, record: Record, step: int, rank: int) -> NDArray[Any]:
        """Physical experts of a record `[H, T, C]`, in their range."""
        what = f"pass {step} of rank {rank}: topk_ids_of_layer"
        ids_HTC = integers(record.get("topk_ids_of_layer"), what, 3)
        num_hidden, num_slots = self._records.physical_to_logical.shape
        if ids_HTC.shape[0] != num_hidden or not ids_HTC.shape[2]:
            raise InputError(f"{what} of shape {ids_HTC.shape}; expected [{num_hidden}, tokens, top-k]")
        if ids_HTC.size and not -1 <= ids_HTC.min() <= ids_HTC.max() < num_slots:
            raise InputError(f"{what} from {ids_HTC.min()} to {ids_HTC.max()}; the map has slots 0 to {num_slots - 1}")
        return ids_HTC

    def _logical(self, ids_HTC: NDArray[Any]) -> NDArray[np.uint16]:
        """Logical experts of the MoE layers, `[T, L, K]`."""
        map_LP = self._records.physical_to_logical[self._layers]
        ids_LTK = ids_HTC[self._layers, :, : self._top_k].astype(np.intp)
        logical_LTK = map_LP[np.arange(len(map_LP))[:, None, None], ids_LTK]  # -1 finds the last, and is put right
        return np.where(ids_LTK < 0, NOT_ROUTED, logical_LTK).astype(np.uint16).transpose(1, 0, 2)

    def _width(self) -> tuple[int, int]:
        """The experts a token, by the columns in use, and the columns."""
        used, columns = 0, set[int]()
        for _, _, _, ids_HTC in self._chosen():
            columns.add(ids_HTC.shape[2])
            used = max(used, int(np.flatnonzero((ids_HTC[self._layers] >= 0).any(axis=(0, 1))).max(initial=-1)) + 1)
        if len(columns) != 1 or not used:
            raise InputError(f"{len(columns)} widths of topk_ids_of_layer; expected tokens, of one width")
        return used, columns.pop()

    def _digest(self, rank: int) -> bytes:
        """A hash of all tokens of a rank."""
        digest = hashlib.sha256()
        for step, record in sorted(self._records.by_rank[rank].items()):
            ids_HTC = self._ids(record, step, rank)
            digest.update(f"{step} {ids_HTC.shape}".encode())
            digest.update(_positions(record, ids_HTC.shape[1]).tobytes())
            digest.update(np.ascontiguousarray(ids_HTC).tobytes())
        return digest.digest()


def _positions(record: Record, count: int) -> NDArray[np.int32]:
    told = record.get("positions")
    if not (isinstance(told, list) and len(told) == count and all(type(place) is int for place in told)):
        raise InputError(f"positions of a record are not the {count} numbers of its tokens")
    if count and not 0 <= min(told) <= max(told) < 2**31:
        raise InputError("positions of a record are not all from 0 to 2,147,483,647")
    return np.array(told, np.int32)
