"""Importer of TensorRT-LLM's expert statistics: `meta_info.json` and a `rank{r}.safetensors` of every rank.

A tensor `{iteration}_{layer}` int64 [experts] is what a rank counted; ranks add up. Layers are hidden layers.

Legend: L MoE layers; E experts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...files import read_json
from ..count_form import CountTable
from ..model import MAX_LAYERS, NOT_ROUTED, ModelSpec
from .cells import check_counted
from .hidden_layers import named_layers, spans
from .source import BLOCK_BYTES, CountSource, Given, check_ranks, common_steps, naming, refusing_damage

MAX_DESCRIPTION_BYTES = 2**20
NAME = re.compile(r"rank([0-9]{1,6})\.safetensors")
KEY = re.compile(r"(0|[1-9][0-9]{0,8})_(0|[1-9][0-9]{0,8})")
FIRST_KEY = re.compile(rb'\{("__metadata__":\{[^}]*\},)?"[0-9]+_[0-9]+":\{"')


def recognises(head: bytes) -> bool:
    """Check whether a file begins as the description, or as tensors of such names."""
    return (head.lstrip().startswith(b"{") and b'"num_experts_per_token"' in head) or bool(FIRST_KEY.match(head, 8))


def open_source(given: Given) -> "StatisticSource":
    """The counts in a directory of statistics."""
    ranks = {path: int(match[1]) for path in given.files if (match := NAME.fullmatch(path.name))}
    described = [path for path in given.files if path.name == "meta_info.json"]
    if len(described) != 1 or not ranks:
        raise InputError(
            f"{len(described)} meta_info.json and {len(ranks)} rank*.safetensors; expected the directory that"
            " EXPERT_STATISTIC_PATH named, with one and at least one of them"
        )
    with naming(described[0].name):
        sizes = _sizes(described[0])
    counts: dict[int, _Rank] = {}
    for path, rank in ranks.items():
        with naming(path.name):
            if rank in counts:
                raise InputError(f"rank {rank} for the second time: counted double")
            counts[rank] = _rank(path, sizes["num_experts"])
    return StatisticSource(counts, sizes, given.model)


@dataclass(frozen=True, slots=True)
class _Rank:
    """An opened file and the iterations and layers that it has, each with each."""

    path: Path
    tensors: Any
    steps: frozenset[int]
    layers: frozenset[int]


class StatisticSource(CountSource):
    """Counts of all ranks."""

    def __init__(self, ranks: dict[int, _Rank], sizes: dict[str, int], model: ModelSpec | None) -> None:
        check_ranks(ranks)
        self._ranks = ranks
        self._steps, left_out = common_steps({rank: part.steps for rank, part in ranks.items()}, "iterations")
        layers = named_layers(frozenset[int]().union(*(rank.layers for rank in ranks.values())), model)
        self._layers = layers.recorded
        self.model = {"layer_ids": layers.ids, **sizes}
        added = f"ranks {spans(sorted(ranks))} added up: tokens, requests and source ranks are unknown"
        self.notes = [*layers.notes, *left_out, added]

    def tables(self, num_experts: int) -> Iterator[CountTable]:
        """The counts by ascending iteration."""
        rows = max(1, BLOCK_BYTES // (8 * len(self._layers) * num_experts))
        for first in range(0, len(self._steps), rows):
            steps = self._steps[first : first + rows]
            counts = [[self._counts(step, layer, num_experts) for layer in self._layers] for step in steps]
            yield CountTable.of_groups(("step",), np.array(steps)[:, None], np.array(counts))

    def _counts(self, step: int, layer: int, num_experts: int) -> NDArray[np.int64]:
        """The counts `[E]` of an iteration and layer, of the ranks that have the layer."""
        counts_E = np.zeros(num_experts, np.int64)
        for rank in self._ranks.values():
            if layer in rank.layers:
                part_E = rank.tensors.get_tensor(f"{step}_{layer}")
                check_counted(part_E, f"{rank.path.name}: {step}_{layer}")
                counts_E += part_E
        return counts_E


def _sizes(path: Path) -> dict[str, int]:
    """The experts and the experts per token that a description tells, as `ModelSpec` names them."""
    value = read_json(path, what="the description of statistics", max_bytes=MAX_DESCRIPTION_BYTES)
    described = value if isinstance(value, dict) else {}
    names = {"num_experts": "num_experts", "top_k": "num_experts_per_token"}
    values: dict[str, Any] = {ours: described.get(theirs) for ours, theirs in names.items()}
    if any(type(value) is not int or not 1 <= value < NOT_ROUTED for value in values.values()):
        raise InputError(f"{str(described)[:80]}; expected num_experts and num_experts_per_token")
    return values


def _rank(path: Path, num_experts: int) -> _Rank:
    """A rank's file, every tensor's name and shape checked and no value read."""
    import safetensors

    with refusing_damage(safetensors.SafetensorError):
        tensors: Any = safetensors.safe_open(path, framework="numpy")
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  no mapping
        kinds = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    for name, (kind, shape) in kinds.items():
        if not KEY.fullmatch(name) or kind not in ("I64", "I32") or shape != [num_experts]:
            raise InputError(
                f"tensor {name[:40]!r} is {kind} {shape}; expected iteration_layer, I64 [{num_experts}] as"
                " meta_info.json says"
            )
    pairs = {tuple(map(int, name.split("_"))) for name in kinds}
    steps, layers = frozenset(step for step, _ in pairs), frozenset(layer for _, layer in pairs)
    if len(pairs) != len(steps) * len(layers) or len(kinds) != len(pairs) or not 0 < len(layers) <= MAX_LAYERS:
        raise InputError(
            f"{len(kinds):,} tensors of {len(steps):,} iterations and {len(layers):,} layers; expected one for each of"
            " both"
        )
    return _Rank(path, tensors, steps, layers)
