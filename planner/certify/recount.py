"""An independent recount of a trace under a placement: the naive twin of `planner.measures.replay`.

It shares no code with the solvers or the replay: membership matrices instead of pairwise comparisons, holders looked up
expert by expert instead of in tables.

Legend: T tokens; L MoE layers; K experts a token; E experts; D devices; U units; B steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from .roster import Roster, Tokens

__all__ = ["MOST_CELLS", "Ledger", "Moves", "Residence", "recount"]

MOST_CELLS = 2**29
NAMES = ("tokens", "hops", "hops_kept", "node_hops_kept", "device_copies", "node_copies", "far_copies")


@dataclass(frozen=True, slots=True)
class Residence:
    """A placement as plain lists: `holders[layer][expert]` is the ascending list of devices that hold it."""

    coherent: bool
    nearest: bool
    holders: Sequence[Sequence[Sequence[int]]]
    num_devices: int
    devices_per_node: int


@dataclass(frozen=True, slots=True)
class Moves:
    """What seconds are told from.

    Parameters
    ----------
    ports
        Copies of dispatch (0) and combine (1), `[2, B, L, class, direction, D]`: inside a node (0) or to another (1),
        that leave (0) or reach (1) a device.
    sitting
        Tokens (0) on each device before a layer, and 2 x position + 1 summed over them (1), `[2, B, L, D]`.
    """

    ports: NDArray[np.int64]
    sitting: NDArray[np.int64]


@dataclass(slots=True)
class Ledger:
    """What a recount found: per-unit sums by name `[U]`, loads `[B, L, D]`, and tokens in counted steps.

    Of counts alone there are no sums.
    """

    sums: dict[str, NDArray[np.int64]]
    loads: NDArray[Any]
    moves: Moves | None
    step_tokens: int = 0

    @classmethod
    def empty(cls, num_units: int, shape: tuple[int, int, int], *, timed: bool) -> "Ledger":
        """A ledger of nothing, for steps, layers and devices."""
        steps, layers, devices = shape
        cells = steps * layers * devices * (1 + 10 * timed)
        if cells > MOST_CELLS:
            raise UsageError(
                f"a recount of {steps:,} steps, {layers} layers and {devices:,} devices needs {cells:,} numbers,"
                f" expected at most {MOST_CELLS:,}: certify without the trace, which checks the structure only"
            )
        moves = None
        if timed:
            moves = Moves(np.zeros((2, steps, layers, 2, 2, devices), np.int64), np.zeros((2, *shape), np.int64))
        return cls({name: np.zeros(num_units, np.int64) for name in NAMES}, np.zeros(shape, np.int64), moves)


def recount(
    parts: Iterable[Tokens], roster: Roster, num_layers: int, residences: Mapping[str, Residence], *, timed: bool
) -> dict[str, Ledger]:
    """Walk every token of a part through every layer of every residence; ledgers by the residences' names.

    Parameters
    ----------
    timed
        Whether to note what moves.
    """
    shape = (roster.num_steps, num_layers, roster.num_devices)
    ledgers = {label: Ledger.empty(len(roster.ordinal_of), shape, timed=timed) for label in residences}
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
        for phase, end_T in enumerate((here_T, after_T)):
            other_node = np.arange(residence.num_devices) // group != (end_T // group)[:, None]
            seen["far_copies"] += (visited & other_node).sum(axis=1)
            if ledger.moves:
                _move(ledger.moves.ports[phase, :, layer], visited, end_T, tokens.step, group, returning=phase == 1)
        if ledger.moves:
            _sit(ledger.moves.sitting[:, :, layer], here_T, tokens)
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


def _move(
    ports: NDArray[np.int64],
    visited: NDArray[np.bool_],
    end_T: NDArray[np.int64],
    step_T: NDArray[np.int64],
    group: int,
    *,
    returning: bool,
) -> None:
    """Add a layer's copies between each token's end and the other devices it visits, `[B, class, direction, D]`."""
    token, device = np.nonzero(visited & (step_T >= 0)[:, None])
    token, device = token[end_T[token] != device], device[end_T[token] != device]
    step, end = step_T[token], end_T[token]
    far = (end // group != device // group).astype(np.int64)
    leaves, reaches = (device, end) if returning else (end, device)
    np.add.at(ports, (step, far, 0, leaves), 1)
    np.add.at(ports, (step, far, 1, reaches), 1)


def _sit(sitting: NDArray[np.int64], here_T: NDArray[np.int64], tokens: Tokens) -> None:
    """Add the tokens of a layer, and their contexts, where they are."""
    counted = tokens.step >= 0
    cells = (tokens.step[counted], here_T[counted])
    np.add.at(sitting[0], cells, 1)
    np.add.at(sitting[1], cells, 2 * tokens.position[counted] + 1)


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
