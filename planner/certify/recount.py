"""An independent recount of a trace under a placement: the naive twin of `planner.survey` and `planner.replay`.

It shares no code with the solvers or the replay: membership matrices instead of pairwise comparisons, holders looked up
expert by expert instead of in tables.

Legend: T tokens; L MoE layers; K experts a token; E experts; D devices; U units; B steps.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...traces.reader import Trace
from ...traces.schema import TokenBatch

__all__ = ["Ledger", "Residence", "Roster", "Tokens", "enroll", "recount", "tokens_of"]

BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class Residence:
    """A placement as plain lists: `holders[layer][expert]` is the ascending list of devices that hold it."""

    coherent: bool
    nearest: bool
    holders: Sequence[Sequence[Sequence[int]]]
    num_devices: int
    devices_per_node: int


@dataclass(frozen=True, slots=True)
class Roster:
    """The units of one part of a trace: the ordinal of each, and how homes and steps follow from it."""

    kind: str
    ordinal_of: dict[int, int]
    num_tokens: int
    num_steps: int
    num_dropped: int
    samples_per_step: int
    num_devices: int
    recorded_home: bool
    step_names: dict[int, int] | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some tokens of a part: ids `[T, L, K]`, unit ordinal, home, step (-1: none) and turn, each `[T]`."""

    ids: NDArray[np.uint16]
    unit: NDArray[np.int64]
    home: NDArray[np.int64]
    step: NDArray[np.int64]
    turn: NDArray[np.int64]


@dataclass(slots=True)
class Ledger:
    """What a recount found: per-unit sums by name `[U]`, loads `[B, L, D]`, and tokens in counted steps."""

    sums: dict[str, NDArray[np.int64]]
    loads: NDArray[np.int64]
    step_tokens: int = 0


def enroll(
    trace: Trace,
    *,
    seed: int,
    fraction: float,
    fit: bool,
    num_devices: int,
    samples_per_step: int,
    phases: Sequence[str],
) -> Roster:
    """The units of the fitted (or held-out) part, by DESIGN's rules, from the scalar columns."""
    tokens_of: Counter[int] = Counter()
    unit_steps: set[tuple[int, int]] = set()
    highest_rank, kind = -1, "block"
    for batch, unit in _units(trace, (), phases):
        kind = "sample" if batch.sample is not None else "step" if batch.step is not None else "block"
        tokens_of.update(unit.tolist())
        unit_steps.update(() if batch.step is None else zip(unit.tolist(), batch.step.tolist(), strict=True))
        highest_rank = max(highest_rank, *(() if batch.source_rank is None else batch.source_rank.tolist()), -1)
    limit = int(fraction * 2**64)
    wanted = [unit for unit in sorted(tokens_of) if (_hash(f"{seed}:{unit}") < limit) == fit]
    ordinal_of = {unit: ordinal for ordinal, unit in enumerate(wanted)}
    steps = sorted({step for unit, step in unit_steps if unit in ordinal_of})
    whole_steps = max(len(wanted) // samples_per_step, 1)
    return Roster(
        kind=kind,
        ordinal_of=ordinal_of,
        num_tokens=sum(tokens_of[unit] for unit in wanted),
        num_steps=len(steps) or whole_steps,
        num_dropped=0 if steps else max(len(wanted) - whole_steps * samples_per_step, 0),
        samples_per_step=samples_per_step,
        num_devices=num_devices,
        recorded_home=highest_rank + 1 == num_devices,
        step_names={step: index for index, step in enumerate(steps)} if steps else None,
    )


def tokens_of(trace: Trace, roster: Roster, phases: Sequence[str]) -> Iterator[Tokens]:
    """The tokens of a part, batch by batch."""
    for batch, unit in _units(trace, None, phases):
        ordinals = [roster.ordinal_of.get(one, -1) for one in unit.tolist()]
        rows = [row for row, ordinal in enumerate(ordinals) if ordinal >= 0]
        unit_T = np.array(ordinals, dtype=np.int64)[rows]
        home_T = unit_T % roster.num_devices
        if roster.recorded_home and batch.source_rank is not None:
            home_T = batch.source_rank[rows].astype(np.int64)
        step_T = unit_T // roster.samples_per_step
        step_T[step_T >= roster.num_steps] = -1
        if roster.step_names is not None and batch.step is not None:
            step_T = np.array([roster.step_names[one] for one in batch.step[rows].tolist()], dtype=np.int64)
        yield Tokens(batch.ids[rows], unit_T, home_T, step_T, unit[rows] + batch.position[rows])


def recount(
    parts: Iterable[Tokens], roster: Roster, num_layers: int, residences: Mapping[str, Residence]
) -> dict[str, Ledger]:
    """Walk every token of a part through every layer of every residence; ledgers by the residences' names."""
    shape = (roster.num_steps, num_layers, roster.num_devices)
    names = ("tokens", "hops", "hops_kept", "node_hops_kept", "device_copies", "node_copies", "far_copies")
    ledgers = {
        label: Ledger({name: np.zeros(len(roster.ordinal_of), np.int64) for name in names}, np.zeros(shape, np.int64))
        for label in residences
    }
    for tokens in parts:
        for label, residence in residences.items():
            _walk(tokens, residence, ledgers[label])
    return ledgers


def _walk(tokens: Tokens, residence: Residence, ledger: Ledger) -> None:
    total = len(tokens.unit)
    seen = {name: np.zeros(total, np.int64) for name in ledger.sums}
    seen["tokens"] += 1
    here_T, last_T = tokens.home.copy(), np.full(total, -1)
    group = residence.devices_per_node
    for layer in range(tokens.ids.shape[1]):
        device_TK = _devices(tokens, layer, here_T, residence)
        first_T = _first(device_TK)
        after_T = np.where(first_T >= 0, first_T, here_T) if residence.coherent else here_T
        for name, width in (("device_copies", 1), ("node_copies", group)):
            visited = _visited(device_TK, width, residence.num_devices)
            seen[name] += _without(visited, here_T // width) + _without(visited, after_T // width)
        visited = _visited(device_TK, 1, residence.num_devices)
        for end_T in (here_T, after_T):
            other_node = np.arange(residence.num_devices) // group != (end_T // group)[:, None]
            seen["far_copies"] += (visited & other_node).sum(axis=1)
        hop = (last_T >= 0) & (device_TK[:, 0] >= 0)
        seen["hops"] += hop
        seen["hops_kept"] += hop & (last_T == device_TK[:, 0])
        seen["node_hops_kept"] += hop & (last_T // group == device_TK[:, 0] // group)
        last_T, here_T = device_TK[:, 0], after_T
        token, choice = np.nonzero((device_TK >= 0) & (tokens.step >= 0)[:, None])
        np.add.at(ledger.loads[:, layer], (tokens.step[token], device_TK[token, choice]), 1)
    ledger.step_tokens += int((tokens.step >= 0).sum())
    for name, values_T in seen.items():
        np.add.at(ledger.sums[name], tokens.unit, values_T)


def _units(
    trace: Trace, layers: tuple[int, ...] | None, phases: Sequence[str]
) -> Iterator[tuple[TokenBatch, NDArray[np.int64]]]:
    """Batches with the unit of each token: its sample, else its step, else its block of rows."""
    row = 0
    for batch in trace.batches(layers, phases=phases or None):
        unit = batch.sample if batch.sample is not None else batch.step
        if unit is None:
            unit = np.arange(row, row + len(batch)) // BLOCK_ROWS
        row += len(batch)
        yield batch, unit.astype(np.int64)


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)


def _devices(tokens: Tokens, layer: int, here_T: NDArray[np.int64], residence: Residence) -> NDArray[np.int64]:
    """The device every routed cell of a layer goes to `[T, K]`, -1 where not routed; replicated experts one by one."""
    holders = residence.holders[layer]
    ids_TK = tokens.ids[:, layer]
    only_E = np.array([*(held[0] for held in holders), -1])  # the last entry is for cells not routed
    device_TK = only_E[np.minimum(ids_TK, len(holders))]
    for expert, held in enumerate(holders):
        if len(held) == 1:
            continue
        token, choice = np.nonzero(ids_TK == expert)
        for here in np.unique(here_T[token]):
            at = here_T[token] == here
            offered = np.array(_offered(list(held), int(here), residence))
            device_TK[token[at], choice[at]] = offered[tokens.turn[token[at]] % len(offered)]
    return device_TK


def _offered(holders: list[int], here: int, residence: Residence) -> list[int]:
    """The holders a token at device `here` may use, by the plan's replica rule."""
    if not residence.nearest:
        return holders
    if here in holders:
        return [here]
    near = [d for d in holders if d // residence.devices_per_node == here // residence.devices_per_node]
    return near or holders


def _first(device_TK: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first routed device of each row, -1 where there is none."""
    first_T = np.full(len(device_TK), -1)
    for column in device_TK.T[::-1]:
        first_T = np.where(column >= 0, column, first_T)
    return first_T


def _visited(device_TK: NDArray[np.int64], width: int, num_devices: int) -> NDArray[np.bool_]:
    """Whether a token visits each place (groups of `width` devices), `[T, places]`."""
    visited = np.zeros((len(device_TK), num_devices // width), dtype=bool)
    token, slot = np.nonzero(device_TK >= 0)
    visited[token, device_TK[token, slot] // width] = True
    return visited


def _without(visited: NDArray[np.bool_], place_T: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places visited other than the token's own, `[T]`."""
    own_T = visited[np.arange(len(visited)), place_T]
    remote_T: NDArray[np.int64] = visited.sum(axis=1) - own_T
    return remote_T
