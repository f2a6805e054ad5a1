"""The records of SGLang's modes per_pass and per_token: what each rank saw of each forward pass.

Legend: H hidden layers; P physical experts (slots) a layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..model import MAX_LAYERS, NOT_ROUTED
from .source import check_ranks, naming
from .torch_file import integers

__all__ = ["Records", "records_of"]

Record = Mapping[str, Any]
FOLDED = "physical experts taken as the last map has them: wrong where EPLB moved experts while recording"


@dataclass(frozen=True)
class Records:
    """Records of all ranks.

    Parameters
    ----------
    by_rank
        By rank and forward pass.
    physical_to_logical
        `[H, P]`: the logical expert in each physical one, when the recording ended.
    of_tokens
        Whether they hold tokens, not only counts.
    """

    by_rank: Mapping[int, Mapping[int, Record]]
    physical_to_logical: NDArray[np.int64]
    of_tokens: bool

    @property
    def num_experts(self) -> int:
        """Logical experts: each is in some slot."""
        return int(self.physical_to_logical.max()) + 1


def records_of(dumps: Mapping[Path, Record]) -> Records:
    """The records in dumps of one or several ranks.

    InputError where they are of another layout, a pass of a rank is there twice, ranks are missing, or maps differ.
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
