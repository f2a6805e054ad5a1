"""The naive replay: a trace recounted token by token, row by row, under every journey.

It gives what `planner.evaluate.replay` gives and shares nothing with it: membership matrices in place of comparisons by
pairs, holders looked up expert by expert, homes and steps from a census of its own, which the scene's must agree with.

Legend: R rows, tokens or those of counts; L MoE layers; K experts a token; E experts; D devices; N nodes; B steps;
I units.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError, UsageError
from ...traces.count_form import CountTable, CountTrace
from ...traces.schema import TokenBatch
from ..evaluate.journey import Journey
from ..evaluate.scene import Scene
from ..evaluate.tally import COUNTS, Ports, Tally, check_cells
from .census import Census, Roster, Rows, take_census

__all__ = ["NaiveReplay", "devices_of", "holders_of"]

Numbers = NDArray[np.int64]
Holders = list[list[list[int]]]  # [layer][expert] -> devices, ascending


@dataclass(frozen=True, slots=True)
class NaiveReplay:
    """A `Replay` by the split that a plan names: the share of units that is fitted, and those of a derived step."""

    fraction: float
    samples_per_step: int

    def __call__(
        self, scene: Scene, journeys: Sequence[Journey], *, ports: bool = False, between: bool = False
    ) -> list[list[Tally]]:
        """The tally of every journey on every part, `[part][journey]`.

        Raises
        ------
        CertificationError
            The scene's parts run otherwise than the trace says, or samples move where they may not.
        """
        census = take_census(scene, self.fraction, self.samples_per_step)
        for roster, cohort in zip(census.rosters, scene.cohorts, strict=True):
            roster.check(cohort)
            for journey in journeys:
                _check_moves(roster, journey, scene.cluster.num_devices)
        sheets = [
            [_Sheet(scene, roster, one, ports=ports, between=between) for one in _distinct(journeys)]
            for roster in census.rosters
        ]
        for batch, unit_R, place_R in census.rows(scene):
            for roster, row in zip(census.rosters, sheets, strict=True):
                rows = roster.rows(batch, unit_R, place_R)
                for sheet in row:
                    sheet.add(batch, rows)
        which = [next(n for n, one in enumerate(_distinct(journeys)) if _alike(one, journey)) for journey in journeys]
        return [
            [row[number].tally(census, roster) for number in which]
            for roster, row in zip(census.rosters, sheets, strict=True)
        ]


def holders_of(journey: Journey) -> Holders:
    """The devices that hold each expert."""
    device_P = [device for device, width in enumerate(journey.placement.slots.tolist()) for _ in range(width)]
    layers: Holders = []
    for row in journey.placement.physical_to_logical.tolist():
        held: list[list[int]] = [[] for _ in range(journey.placement.num_experts)]
        for device, expert in zip(device_P, row, strict=True):
            held[expert].append(device)
        layers.append(held)
    return layers


def devices_of(
    ids_RK: NDArray[np.integer], holders: list[list[int]], rule: str, here_R: Numbers, turn_R: Numbers, group: int
) -> Numbers:
    """The device that every routed cell goes to `[R, K]`, -1 where not routed; replicated experts one by one."""
    only_E = np.array([*(held[0] for held in holders), -1])  # the last is of cells not routed
    device_RK = only_E[np.minimum(ids_RK, len(holders))]
    for expert in (expert for expert, held in enumerate(holders) if len(held) > 1):
        row, choice = np.nonzero(ids_RK == expert)
        for here in np.unique(here_R[row]).tolist():
            at = here_R[row] == here
            offered = np.array(_offered(holders[expert], here, group) if rule == "nearest" else holders[expert])
            device_RK[row[at], choice[at]] = offered[turn_R[row[at]] % len(offered)]
    return np.asarray(device_RK)


def _offered(holders: list[int], here: int, group: int) -> list[int]:
    """The holders that a token takes turns at by the rule nearest: its own device, else its node's, else all."""
    if here in holders:
        return [here]
    return [device for device in holders if device // group == here // group] or holders


def _alike(one: Journey, other: Journey) -> bool:
    """Whether tokens go the same way: chunks and capacities change none."""
    ways = [(way.dispatch_model, way.replica_rule, way.moves is None) for way in (one, other)]
    moved = one.moves is other.moves
    if one.moves is not None and other.moves is not None:
        moved = np.array_equal(one.moves, other.moves)
    return ways[0] == ways[1] and moved and one.placement.sends_as(other.placement)


def _distinct(journeys: Sequence[Journey]) -> list[Journey]:
    """Drop each journey that moves tokens as an earlier one does."""
    return [one for n, one in enumerate(journeys) if not any(_alike(one, before) for before in journeys[:n])]


def _check_moves(roster: Roster, journey: Journey, size: int) -> None:
    """Refuse homes that give a device more of a step's samples than its share, and incomplete steps that move."""
    if journey.moves is None or journey.homes is None or roster.step is None:
        return
    moves_LM = journey.moves[:, roster.members]
    if (moves_LM[:, roster.step < 0] != moves_LM[0, roster.step < 0]).any():
        raise CertificationError("samples of an incomplete step change their device; expected them to stay")
    if journey.dispatch_model != "migrating":
        return
    for layer, step in np.ndindex(len(moves_LM) - 1, roster.num_steps):
        device = moves_LM[layer + 1, roster.step == step]
        if np.bincount(device, minlength=size).max() > -(-len(device) // size):
            raise CertificationError(f"layer {layer}: a device takes more samples of a step than its share")


class _Sheet:
    """Recount of one journey over one part of the trace."""

    def __init__(self, scene: Scene, roster: Roster, journey: Journey, *, ports: bool, between: bool) -> None:
        cluster, placement, size = scene.cluster, journey.placement, scene.cluster.num_devices
        self.journey, self.group, self.rehomed = journey, cluster.devices_per_node, journey.moves is not None
        self.counted, self.of_counts = scene.samples is not None, isinstance(scene.source, CountTrace)
        self.rule = str(placement.replica_rule if journey.replica_rule is None else journey.replica_rule)
        self.holders, shape = holders_of(journey), (roster.num_steps, placement.num_layers, size)
        self.loads_alone = self.of_counts and not self.rehomed
        if placement.has_replicas and self.of_counts and self.rule != "even":
            raise CertificationError(f"counts do not say which replica serves a token by the rule {self.rule}")
        if self.rule not in ("even", "nearest"):
            raise UsageError(f"replicas by the rule {self.rule}; expected even or nearest")
        lengths = dict(zip(("steps", "layers", "devices"), shape, strict=True))
        self.ports = self.sitting = None
        if (ports or self.rehomed) and not self.loads_alone:
            check_cells("a recount", cluster, exchanges=2, classes=2, directions=2, **lengths)
            self.ports = np.zeros((2, shape[0], shape[1], 2, 2, size), np.int64)
            self.sitting = np.zeros((2, *shape), np.int64)
        check_cells("a recount", cluster, **lengths)
        self.loads = np.zeros(shape, np.float64 if self.of_counts else np.int64)
        units = roster.num_steps if self.counted or self.loads_alone else len(roster.members)
        self.counts = {name: np.zeros(units, np.int64) for name in COUNTS}
        self.between = np.zeros((size, size), np.int64) if (between and not self.of_counts) or self.rehomed else None
        self.classes = [kind for kind, span in enumerate((self.group, cluster.num_nodes)) if span > 1]

    def add(self, batch: TokenBatch | CountTable, rows: Rows) -> None:
        """Add the rows of this part in a batch or a table."""
        if isinstance(batch, CountTable):
            for layer in range(self.journey.placement.num_layers):
                here = (batch.layer[rows.number] == layer) & (rows.step >= 0)
                self._add_counts(batch.counts[rows.number[here]], rows.step[here], rows.place[here], layer)
        else:
            self._walk(batch, rows)

    def _add_counts(self, counts_RE: Numbers, step_R: Numbers, place_R: Numbers, layer: int) -> None:
        """Share counts among the holders of each expert; where samples move, every pair is a copy."""
        pairs_RD = np.zeros((len(counts_RE), self.loads.shape[2]))
        for expert, devices in enumerate(self.holders[layer]):
            for device in devices:
                pairs_RD[:, device] += counts_RE[:, expert] / len(devices)
        np.add.at(self.loads[:, layer], step_R, pairs_RD)
        if self.journey.moves is not None:
            ends = self.journey.moves[layer, place_R], self.journey.moves[layer + 1, place_R]
            copies_RD = pairs_RD.astype(np.int64)
            nodes_RN = np.add.reduceat(copies_RD, np.arange(0, copies_RD.shape[1], self.group), axis=1)
            self._exchange(layer, copies_RD, nodes_RN, ends, step_R, step_R)

    def _walk(self, batch: TokenBatch, rows: Rows) -> None:
        """Take tokens through every layer."""
        position, size = batch.position[rows.number].astype(np.int64), self.loads.shape[2]
        turn, context = rows.unit + position, 2 * position + 1
        row = rows.step if self.counted else rows.ordinal
        here, before = rows.home, np.full(len(rows.home), -1)
        _add(self.counts["tokens"], row, 1)
        for layer, holders in enumerate(self.holders):
            here = here if self.journey.moves is None else self.journey.moves[layer, rows.place]
            ids_RK = batch.ids[rows.number, layer]
            device_RK = devices_of(ids_RK, holders, self.rule, here, turn, self.group)
            first = device_RK[:, 0]
            after = here if self.journey.moves is None else self.journey.moves[layer + 1, rows.place]
            if self.journey.dispatch_model == "coherent":
                after = _first(device_RK, here)
            visits_RD = _visited(device_RK, size)
            visits_RN = _visited(np.where(device_RK < 0, -1, device_RK // self.group), size // self.group)
            self._exchange(layer, visits_RD, visits_RN, (here, after), rows.step, row)
            self._sit(layer, here, rows.step, context)
            hop = (before >= 0) & (first >= 0) & (not self.rehomed)
            _add(self.counts["hops"], row, hop)
            _add(self.counts["hops_kept"], row, hop & (before == first))
            _add(self.counts["node_hops_kept"], row, hop & (before // self.group == first // self.group))
            token, choice = np.nonzero((device_RK >= 0) & (rows.step >= 0)[:, None])
            np.add.at(self.loads[:, layer], (rows.step[token], device_RK[token, choice]), 1)
            here, before = after, first

    def _exchange(
        self,
        layer: int,
        copies_RD: Numbers,
        visits_RN: Numbers,
        ends: tuple[Numbers, Numbers],
        step_R: Numbers,
        row_R: Numbers,
    ) -> None:
        """Add the copies `[R, D]` between rows' devices and where they are dispatched from and combined at.

        Parameters
        ----------
        visits_RN
            Of nodes, a token's one or none.
        row_R
            What each row counts for, -1 for nothing.
        """
        line, (sent_R, met_R) = np.arange(len(copies_RD)), ends
        phases = (0,) if sent_R is met_R else (0, 1)  # where tokens return, a combine is a dispatch backwards
        for phase in phases:
            end_R, times = ends[phase], 3 - len(phases)
            away_RD, node_R = copies_RD.copy(), end_R // self.group
            away_RD[line, end_R] = 0
            far_RD = away_RD * (np.arange(away_RD.shape[1]) // self.group != node_R[:, None])
            _add(self.counts["device_copies"], row_R, times * away_RD.sum(axis=1))
            _add(self.counts["far_copies"], row_R, times * far_RD.sum(axis=1))
            _add(self.counts["node_copies"], row_R, times * (visits_RN.sum(axis=1) - visits_RN[line, node_R]))
            row, device = np.nonzero(away_RD * (step_R >= 0)[:, None])
            number, step, end = away_RD[row, device], step_R[row], end_R[row]
            far = np.asarray(far_RD[row, device] > 0, np.int64)
            leaves, reaches = ((end, device), (device, end))[phase]
            if self.ports is not None:
                ports = self.ports[phase, :, layer]
                np.add.at(ports, (step, far, np.zeros_like(far), leaves), number)
                np.add.at(ports, (step, far, np.ones_like(far), reaches), number)
            if self.between is not None:
                np.add.at(self.between, (leaves, reaches), number)
                if len(phases) == 1:
                    np.add.at(self.between, (reaches, leaves), number)

    def _sit(self, layer: int, here_R: Numbers, step_R: Numbers, context_R: Numbers) -> None:
        """Add tokens and their contexts where they are before a layer."""
        if self.sitting is not None:
            at = step_R >= 0
            np.add.at(self.sitting[0, :, layer], (step_R[at], here_R[at]), 1)
            np.add.at(self.sitting[1, :, layer], (step_R[at], here_R[at]), context_R[at])

    def tally(self, census: Census, roster: Roster) -> Tally:
        """Tally of the recount, in the form that evaluation takes."""
        moved = None
        if self.journey.moves is not None and roster.step is not None:
            moves_LM = self.journey.moves[:, roster.members]
            leaves_M = (moves_LM[1:] != moves_LM[:-1]).mean(axis=0)
            moved = np.array([leaves_M[roster.step == step].mean() for step in range(roster.num_steps)])
            if self.of_counts and self.sitting is not None:
                self._seat(census, roster, moves_LM)
        ports, stays = None, self.journey.dispatch_model == "standard" and not self.rehomed
        if self.ports is not None and self.sitting is not None:
            dispatch, combine = self.ports[:, :, :, self.classes]
            combine = dispatch[:, :, :, ::-1] if stays else combine
            ports = Ports(dispatch, combine, *self.sitting[:, :, : 1 if stays else None])
        counts = np.stack([*self.counts.values()], axis=1)[:, : 0 if self.loads_alone else None]
        return Tally(counts, self.loads, self.journey.placement.slots, ports, self.between, moved)

    def _seat(self, census: Census, roster: Roster, moves_LM: Numbers) -> None:
        """Add the tokens of samples that are known by their counts alone."""
        assert roster.step is not None
        assert self.sitting is not None
        tokens, contexts = census.tokens[roster.members], census.contexts[roster.members]
        self.counts["tokens"][:] = 0
        self.sitting[:] = 0
        _add(self.counts["tokens"], roster.step, tokens)
        at = roster.step >= 0
        for layer in range(len(moves_LM) - 1):
            cell = (roster.step[at], moves_LM[layer, at])
            np.add.at(self.sitting[0, :, layer], cell, tokens[at])
            np.add.at(self.sitting[1, :, layer], cell, contexts[at])


def _add(to: Numbers, row_R: Numbers, number: NDArray[np.integer | np.bool_] | int) -> None:
    """Add numbers to the rows that count."""
    counts = row_R >= 0
    weights = np.full(counts.sum(), number) if isinstance(number, int) else number[counts]
    to += np.bincount(row_R[counts], weights, len(to)).astype(np.int64)


def _first(device_RK: Numbers, here_R: Numbers) -> Numbers:
    """The device of the first routed choice of each row; where there is none, it stays."""
    first_R = here_R
    for column in device_RK.T[::-1]:
        first_R = np.where(column >= 0, column, first_R)
    return first_R


def _visited(device_RK: Numbers, size: int) -> Numbers:
    """Whether a token visits each device, or node, `[R, D]`."""
    visited = np.zeros((len(device_RK), size + 1), np.int64)
    visited[np.arange(len(device_RK))[:, None], device_RK] = 1  # the last column is for cells not routed, -1
    return visited[:, :size]
