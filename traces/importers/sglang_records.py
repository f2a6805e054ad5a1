"""The records of SGLang's modes per_pass and per_token: what each rank saw of each forward pass.

Legend: H hidden layers; L MoE layers; P physical experts (slots) a layer; T tokens of a record; K experts per token; C
columns that the recorder keeps.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, MismatchError
from ..model import MAX_LAYERS, NOT_ROUTED, ModelSpec
from ..schema import PHASES, TokenBatch
from .cells import UNORDERED
from .hidden_layers import check_routed, with_experts
from .source import BLOCK_BYTES, TokenSource, check_ranks, first_of_each, naming
from .torch_file import integers

Record = Mapping[str, Any]
PHASE_OF_MODE = {1: "prefill", 2: "decode"}  # SGLang's ForwardMode; in others both occur
FOLDED = "physical experts taken as the last map has them: wrong where EPLB moved experts while recording"


@dataclass(frozen=True)
class Records:
    """Records of all ranks."""

    by_rank: Mapping[int, Mapping[int, Record]]  #: By rank and forward pass
    #: `[H, P]`: the logical expert in each physical one, when the recording ended
    physical_to_logical: NDArray[np.int64]
    of_tokens: bool  #: Whether they hold tokens, not only counts

    @property
    def num_experts(self) -> int:
        """Logical experts: each is in some slot."""
        return int(self.physical_to_logical.max()) + 1


def records_of(dumps: Mapping[Path, Record]) -> Records:
    """The records in dumps of one or several ranks.

    Raises InputError where they are of another layout, a pass of a rank is there twice, ranks lack, or maps differ.
    """
    by_rank: dict[int, dict[int, Record]] = {}
    maps, kinds = [], set()
    for path, dump in dumps.items():
        with naming(path.name):
            maps.append(_map(dump.get("last_physical_to_logical_map")))
            records = dump.get("records")
            if not (isinstance(records, list) and all(isinstance(record, dict) for record in records)):
                raise InputError("records is no list of records; expected what SGLang's recorder dumps")
            for place, record in enumerate(records):
                step, rank = (_number(record, key, place) for key in ("forward_pass_id", "rank"))
                if record.get("gatherer_key") != "primary":
                    raise InputError(f"record {place}: gatherer_key is not primary; expected no two-batch overlap")
                if step in by_rank.setdefault(rank, {}):
                    raise InputError(f"record {place}: pass {step} of rank {rank} for the second time: counted double")
                by_rank[rank][step] = record
                kinds.add("topk_ids_of_layer" in record)
    if len(kinds) != 1:
        raise InputError("records of per_token and per_pass together; expected one mode" if kinds else "no records")
    if not all(np.array_equal(map_HP, maps[0]) for map_HP in maps[1:]):
        raise InputError("dumps of different maps: EPLB moved experts between them; import those of one map at a time")
    check_ranks(by_rank)
    return Records(by_rank, maps[0], kinds.pop())


class TokensSource(TokenSource):
    """Tokens of all ranks by forward pass: choices by physical expert, -1 where there is none."""

    def __init__(self, records: Records, model: ModelSpec | None) -> None:
        self._records, self._model = records, model
        self._layers = with_experts(len(records.physical_to_logical), model)
        self._ranks, notes = first_of_each((rank, self._digest(rank)) for rank in records.by_rank)
        top_k, columns = self._width()
        if model is not None and not top_k <= model.top_k <= columns:
            raise MismatchError(
                f"{top_k} experts per token in {columns} columns; config.json says {model.top_k} (SGLang records 8 at"
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
            known_phase = PHASE_OF_MODE.get(mode) if isinstance(mode, int) else None
            untold += 0 if known_phase else len(position_T)
            for first in range(0, len(position_T), rows):
                ids_HTC = whole_HTC[:, first : first + rows]
                count = ids_HTC.shape[1]
                filled_H |= (ids_HTC > 0).any(axis=(1, 2))
                yield TokenBatch(
                    step=np.full(count, step, np.int32),
                    sample=None,
                    position=position_T[first : first + rows],
                    source_rank=np.full(count, rank, np.int32),
                    phase=np.full(count, PHASES.index(known_phase or phase), np.int8),
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
        """The experts per token, by the columns in use, and the columns."""
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
    positions = record.get("positions")
    if not (isinstance(positions, list) and len(positions) == count and all(type(place) is int for place in positions)):
        raise InputError(f"positions of a record are not the {count} numbers of its tokens")
    if count and not 0 <= min(positions) <= max(positions) < 2**31:
        raise InputError("positions of a record are not all from 0 to 2,147,483,647")
    return np.array(positions, np.int32)


def _number(record: Record, key: str, place: int) -> int:
    value = record.get(key)
    if type(value) is not int or not 0 <= value < 2**31:
        raise InputError(f"record {place}: {key} of type {type(value).__name__}; expected 0 to 2,147,483,647")
    return value


def _map(value: Any) -> NDArray[np.int64]:
    """The map, each layer of which has every logical expert."""
    map_HP = integers(value, "last_physical_to_logical_map", 2)
    if min(map_HP.shape) < 1 or map_HP.shape[0] > MAX_LAYERS or map_HP.shape[1] >= NOT_ROUTED:
        raise InputError(f"last_physical_to_logical_map of shape {map_HP.shape}; expected [layers, slots]")
    num_experts = int(map_HP.max()) + 1
    experts = np.arange(min(num_experts, map_HP.shape[1] + 1))
    if any(not np.array_equal(np.unique(row_P), experts) for row_P in map_HP):
        raise InputError("last_physical_to_logical_map lacks an expert in some layer; expected each in a slot at least")
    return map_HP.astype(np.int64)
