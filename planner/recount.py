"""An independent recount of a trace under a placement: the naive twin of `planner.replay` and `planner.metrics`.

It shares no code with the solvers or the replay: membership matrices instead of pairwise comparisons, holders looked up
expert by expert instead of in tables. `planner.certify` holds the plan's claims against it.

Legend: T tokens; L MoE layers; K experts a token; E experts; D devices; U units; B steps.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..traces.reader import Trace

__all__ = ["Layout", "Ledger", "Tokens", "read_part", "recount"]

BLOCK_ROWS = 64
NOT_ROUTED = 65_535


@dataclass(frozen=True, slots=True)
class Layout:
    """A placement as plain lists: `holders[layer][expert]` is the ascending list of devices that hold it."""

    coherent: bool
    nearest: bool
    holders: Sequence[Sequence[Sequence[int]]]
    num_devices: int
    devices_per_node: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one part of a trace: ids `[T, L, K]`, unit ordinal, home, step (-1: none) and turn, each `[T]`."""

    ids: NDArray[np.uint16]
    unit: NDArray[np.int64]
    home: NDArray[np.int64]
    step: NDArray[np.int64]
    turn: NDArray[np.int64]
    num_units: int
    num_steps: int
    num_dropped: int


@dataclass(slots=True)
class Ledger:
    """What a recount found: per-unit sums by name `[U]`, and loads `[B, L, D]`."""

    loads: NDArray[np.int64]
    sums: dict[str, NDArray[np.int64]] = field(default_factory=dict)


def read_part(
    trace: Trace, *, seed: int, fraction: float, fit: bool, num_devices: int, samples_per_step: int, phases: list[str]
) -> Tokens:
    """The fitted (or held-out) tokens of a trace, located by DESIGN's rules from the columns themselves."""
    table = _columns(trace, phases)
    unit, step, rank = table.unit, table.step, table.rank
    limit = int(fraction * 2**64)
    digest = {u: hashlib.sha256(f"{seed}:{u}".encode()).hexdigest()[:16] for u in set(unit.tolist())}
    wanted = sorted(u for u, text in digest.items() if (int(text, 16) < limit) == fit)
    ordinal_of = {u: i for i, u in enumerate(wanted)}
    rows = np.array([u in ordinal_of for u in unit.tolist()], dtype=bool)
    ordinal_T = np.array([ordinal_of[u] for u in unit[rows].tolist()], dtype=np.int64)
    recorded_home = rank is not None and int(rank.max()) + 1 == num_devices
    home_T = rank[rows] if rank is not None and recorded_home else ordinal_T % num_devices
    if step is not None:
        names = sorted(set(step.tolist()))
        step_T = np.array([names.index(s) for s in step[rows].tolist()], dtype=np.int64)
        num_steps, dropped = len(names), 0
    else:
        num_steps = max(len(wanted) // samples_per_step, 1)
        dropped = max(len(wanted) - num_steps * samples_per_step, 0)
        step_T = ordinal_T // samples_per_step
        step_T[step_T >= num_steps] = -1
    turn_T = unit[rows] + table.position[rows]
    return Tokens(table.ids[rows], ordinal_T, home_T.astype(np.int64), step_T, turn_T, len(wanted), num_steps, dropped)


def recount(tokens: Tokens, layout: Layout) -> Ledger:
    """Walk every token of a part through every layer of a layout."""
    total, num_layers, _ = tokens.ids.shape
    ledger = Ledger(np.zeros((tokens.num_steps, num_layers, layout.num_devices), np.int64))
    per_token: dict[str, NDArray[np.int64]] = defaultdict(lambda: np.zeros(total, np.int64))
    per_token["tokens"] += 1
    here_T, last_T = tokens.home.copy(), np.full(total, -1)
    for layer in range(num_layers):
        device_TK = _devices(tokens, layer, here_T, layout)
        first_T = _first(device_TK)
        after_T = np.where(first_T >= 0, first_T, here_T) if layout.coherent else here_T
        for name, width in (("device_copies", 1), ("node_copies", layout.devices_per_node)):
            visited = _visited(device_TK, width, layout.num_devices)
            per_token[name] += _without(visited, here_T // width) + _without(visited, after_T // width)
        hop = (last_T >= 0) & (device_TK[:, 0] >= 0)
        per_token["hops"] += hop
        per_token["hops_kept"] += hop & (last_T == device_TK[:, 0])
        group = layout.devices_per_node
        per_token["node_hops_kept"] += hop & (last_T // group == device_TK[:, 0] // group)
        last_T, here_T = device_TK[:, 0], after_T
        routed_TK = (device_TK >= 0) & (tokens.step >= 0)[:, None]
        step_TK = np.broadcast_to(tokens.step[:, None], device_TK.shape)
        np.add.at(ledger.loads[:, layer], (step_TK[routed_TK], device_TK[routed_TK]), 1)
    for name, values_T in per_token.items():
        ledger.sums[name] = np.zeros(tokens.num_units, np.int64)
        np.add.at(ledger.sums[name], tokens.unit, values_T)
    return ledger


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a trace, whole; `unit` is the sample, else the step, else the block of rows."""

    ids: NDArray[np.uint16]
    unit: NDArray[np.int64]
    position: NDArray[np.int64]
    step: NDArray[np.int64] | None
    rank: NDArray[np.int64] | None


def _columns(trace: Trace, phases: list[str]) -> _Columns:
    batches = list(trace.batches(phases=phases or None))

    def whole(name: str) -> NDArray[np.int64] | None:
        parts = [getattr(batch, name) for batch in batches]
        return None if parts[0] is None else np.concatenate(parts).astype(np.int64)

    position = whole("position")
    assert position is not None
    sample, step = whole("sample"), whole("step")
    unit = sample if sample is not None else step
    if unit is None:
        unit = np.arange(len(position)) // BLOCK_ROWS
    return _Columns(np.concatenate([batch.ids for batch in batches]), unit, position, step, whole("source_rank"))


def _devices(tokens: Tokens, layer: int, here_T: NDArray[np.int64], layout: Layout) -> NDArray[np.int64]:
    """The device every routed cell of a layer goes to `[T, K]`, -1 where not routed; expert by expert."""
    device_TK = np.full(tokens.ids[:, layer].shape, -1, dtype=np.int64)
    for expert, holders in enumerate(layout.holders[layer]):
        token, slot = np.nonzero(tokens.ids[:, layer] == expert)
        if len(holders) == 1:
            device_TK[token, slot] = holders[0]
            continue
        for here in np.unique(here_T[token]):
            at = here_T[token] == here
            offered = np.array(_offered(list(holders), int(here), layout))
            device_TK[token[at], slot[at]] = offered[tokens.turn[token[at]] % len(offered)]
    return device_TK


def _offered(holders: list[int], here: int, layout: Layout) -> list[int]:
    """The holders a token at device `here` may use, by the plan's replica rule."""
    if not layout.nearest:
        return holders
    if here in holders:
        return [here]
    near = [d for d in holders if d // layout.devices_per_node == here // layout.devices_per_node]
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
