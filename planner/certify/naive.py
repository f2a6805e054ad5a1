"""The naive replay: a trace recounted token by token, row by row, under every journey.

It gives what `planner.evaluate.replay` gives and shares no walk with it: the devices of a token are sorted and listed
once each, not compared pair by pair, and replicas are looked up one expert at a time, or as `naive_split` proves.
Samples that are re-homed are counted one by one, once for each placement, and every journey of theirs is summed up from
these counts.

Legend: R rows: tokens, those of counts, or samples; L MoE layers; K experts per token; E experts; D devices; N nodes;
B steps; I samples; U units of a part.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError, UsageError
from ...solvers.placement import BY_STEP, Placement
from ...traces.count_form import CountTable, CountTrace
from ...traces.reader import Trace
from ...traces.schema import TokenBatch
from ..evaluate.cohort import Cohort, Located
from ..evaluate.homes import Rehoming
from ..evaluate.journey import Journey
from ..evaluate.scene import Scene
from ..evaluate.tally import COUNTS, Tally
from ..evaluate.traffic import SampleCounts, SampleTraffic
from .naive_replicas import devices_of, holders_of
from .naive_split import NaiveSplit
from .naive_waterfill import NaiveWaterfill

Numbers = NDArray[np.int64]
ONE = np.int32(1)  # of the tables' dtype: added in place several times as fast
Visits = tuple[Numbers, Numbers, Numbers]  # rows, the devices or nodes that they visit, and how often


def naive_replay(
    scene: Scene, journeys: Sequence[Journey], *, ports: bool = False, between: bool = False
) -> list[list[Tally]]:
    """Recount of every journey over every part, as `Replay` says; samples that move as `count_samples` counted them.

    CertificationError where samples move that may not.
    """
    for journey, cohort in itertools.product(journeys, scene.cohorts):
        _check_moves(cohort, journey, scene.cluster.num_devices)
    sheets = [
        [_Sheet(scene, cohort, one, ports=ports, between=between) for one in journeys] for cohort in scene.cohorts
    ]
    if scene.fills:
        _count_sent(scene, sheets)
    if any(one.moves is None for one in journeys):
        _walk(scene, sheets)
    return [[sheet.rehomed(scene.samples) if sheet.moves else sheet.finished() for sheet in row] for row in sheets]


def _walk(scene: Scene, sheets: "list[list[_Sheet]]") -> None:
    """Read the trace once, and add it to the sheets of every part, where samples do not move."""
    parts = [
        (cohort, [sheet for sheet in row if not sheet.moves]) for cohort, row in zip(scene.cohorts, sheets, strict=True)
    ]
    if isinstance(scene.source, CountTrace):
        for table in scene.source.tables():
            for cohort, row in parts:
                rows, step = cohort.locate_rows(scene.index.rows(table))
                for sheet in row:
                    sheet.add_counts(table, rows, step)
        return
    for batch, unit_T in scene.index.batches(scene.source, scene.phases or None):
        for cohort, row in parts:
            at = cohort.locate(batch, unit_T)
            for sheet in row:
                sheet.add_tokens(batch, at)


def _count_sent(scene: Scene, sheets: "list[list[_Sheet]]") -> None:
    """Read the trace once before it is walked, and count what every source sends, by which shared experts are dealt."""
    assert isinstance(scene.source, Trace)
    for batch, unit_T in scene.index.batches(scene.source, scene.phases or None):
        for cohort, row in zip(scene.cohorts, sheets, strict=True):
            at = cohort.locate(batch, unit_T)
            for sheet in row:
                sheet.count_sent(batch, at)
    for sheet in itertools.chain(*sheets):
        if sheet.split is not None:
            sheet.split.deal()  # again from the first token on


def count_samples(
    samples: SampleCounts, placements: Sequence[Placement]
) -> tuple[NDArray[np.int32], list[SampleTraffic]]:
    """Count as `Counter` says, token by token."""
    trace, index, cluster, model = samples.trace, samples.index, samples.cluster, samples.trace.meta.model
    size, of_tokens = len(index.sample), isinstance(trace, Trace)
    experts = np.zeros((size, model.num_layers, model.num_experts), np.int32)
    traffics = [SampleTraffic.empty(one, size, cluster, linked=of_tokens) for one in placements]
    held = [holders_of(one) for one in placements]
    if isinstance(trace, CountTrace):
        for table in trace.tables():
            np.add.at(experts, (index.rows(table), table.layer), table.counts)
        for traffic, holders in zip(traffics, held, strict=True):
            for layer, held_E in enumerate(holders):  # every pair is a copy
                for expert, (device,) in enumerate(held_E):  # counts go with no replicas
                    traffic.copies[:, layer, device] += experts[:, layer, expert]
                    traffic.nodes[:, layer, device // cluster.devices_per_node] += experts[:, layer, expert]
        return experts, traffics
    for batch, place_R in index.batches(trace, samples.phases):
        assert batch.sample is not None
        turn_R, fitted_R = batch.sample + batch.position.astype(np.int64), samples.fitted[place_R]
        for layer in range(model.num_layers):
            ids_RK, before_RK = batch.ids[:, layer], batch.ids[:, layer - 1] if layer else None
            row, choice = np.nonzero(ids_RK < model.num_experts)
            np.add.at(experts[:, layer], (place_R[row], ids_RK[row, choice]), ONE)
            for traffic, holders in zip(traffics, held, strict=True):
                device_RK = devices_of(ids_RK, holders[layer], "even", np.full_like(turn_R, -1), turn_R, 1)
                _visit(traffic, layer, place_R, device_RK, before_RK, fitted_R)
    return experts, traffics


def _visit(
    traffic: SampleTraffic,
    layer: int,
    place_R: Numbers,
    device_RK: Numbers,
    before_RK: NDArray[np.integer] | None,
    fitted_R: NDArray[np.bool_],
) -> None:
    """Add the visits of tokens to devices and nodes, and of fitted ones the experts that they come from."""
    row, choice = np.nonzero(device_RK >= 0)
    np.add.at(traffic.pairs[:, layer], (place_R[row], device_RK[row, choice]), ONE)
    row, node, _ = _visits(device_RK // (traffic.copies.shape[2] // traffic.nodes.shape[2]))
    np.add.at(traffic.nodes[:, layer], (place_R[row], node), ONE)
    row, device, _ = _visits(device_RK)
    np.add.at(traffic.copies[:, layer], (place_R[row], device), ONE)
    if before_RK is None or traffic.linked is None:
        return
    for before_R in before_RK.T:
        links = fitted_R[row] & (before_R[row] < traffic.placement.num_experts)
        np.add.at(traffic.linked[layer - 1], (before_R[row[links]], device[links]), 1)


def _check_moves(cohort: Cohort, journey: Journey, size: int) -> None:
    """Refuse homes that give a device more of a step's samples than its share, and incomplete steps that move."""
    if journey.moves is None or journey.homes is None or cohort.step is None:
        return
    moves_LU = journey.moves[:, cohort.unit_ids]
    if (moves_LU[:, cohort.step < 0] != moves_LU[0, cohort.step < 0]).any():
        raise CertificationError("samples of an incomplete step change their device; expected them to stay")
    if journey.dispatch_model != "migrating":
        return
    for layer, step in np.ndindex(len(moves_LU) - 1, cohort.num_steps):
        law = journey.homes.law if isinstance(journey.homes, Rehoming) else None
        if law is not None and law.numbers == "free":
            return
        device = moves_LU[layer + 1, cohort.step == step]
        if np.bincount(device, minlength=size).max() > -(-len(device) // size):
            raise CertificationError(f"layer {layer}: a device takes more samples of a step than its share")


class _Sheet:
    """Recount of one journey over one part of the trace, into a tally of nothing."""

    def __init__(self, scene: Scene, cohort: Cohort, journey: Journey, *, ports: bool, between: bool) -> None:
        self.journey, self.cohort, self.group = journey, cohort, scene.cluster.devices_per_node
        self.moves, self.by_step = journey.moves is not None, scene.samples is not None
        loads_alone = isinstance(scene.source, CountTrace) and not self.moves
        self.by_pairs = loads_alone and scene.goes_by_pairs(journey)
        splits = (journey.placement.has_replicas and journey.rule in BY_STEP) or journey.following is not None
        splits = splits or self.by_pairs
        if journey.placement.has_replicas and loads_alone and journey.rule != "even" and not splits:
            raise CertificationError(f"counts do not say which replica serves a token by the rule {journey.rule}")
        if splits and (self.moves or journey.dispatch_model != "standard"):
            raise UsageError(f"replicas by the rule {journey.rule}, of tokens that do not return home")
        ports = (self.moves or ports) and (not loads_alone or (self.by_pairs and scene.paired))
        between = (self.moves or between) and not loads_alone
        by_step = self.by_step or loads_alone
        kept = {"ports": ports, "between": between, "by_step": by_step}
        tally = Tally.empty(journey, cohort, scene.cluster, **kept, shared=int(scene.fills))
        if loads_alone:
            tally = replace(tally, counts=tally.counts[:, :0], loads=tally.loads.astype(np.float64), sent=None)
        self.tally, self.counts = tally, dict(zip(COUNTS, tally.counts.T, strict=False))
        self.holders = [] if self.moves else holders_of(journey.placement)
        self.waterfill = NaiveWaterfill(scene, cohort, journey) if scene.fills else None
        self.split = self.experts = None
        if splits:
            self.split = NaiveSplit(scene, cohort, journey, by_pairs=self.by_pairs)
            if loads_alone and not self.by_pairs:
                model = scene.source.meta.model
                self.experts = np.zeros((cohort.num_rows, model.num_layers, model.num_experts), np.int64)
            elif not self.by_pairs:
                self.split.deal()

    def add_counts(self, table: CountTable, rows_R: Numbers, step_R: Numbers) -> None:
        """Add the rows of a table that belong to complete steps of this part."""
        if self.experts is not None:
            np.add.at(self.experts, (step_R, table.layer[rows_R]), table.counts[rows_R])
        if self.experts is not None or self.by_pairs:
            return
        for layer, holders in enumerate(self.holders):
            here = table.layer[rows_R] == layer
            counts_RE = table.counts[rows_R[here]]
            for expert, devices in enumerate(holders):
                share_R1 = counts_RE[:, [expert]] / len(devices)
                np.add.at(self.tally.loads[:, layer], (step_R[here][:, None], devices), share_R1)

    def finished(self) -> Tally:
        """The tally by step, once the trace is read."""
        if self.split is not None and self.experts is not None:
            for layer in range(self.experts.shape[1]):
                self.tally.loads[:, layer] = self.split.loads_of(layer, self.experts[:, layer])
        if self.split is not None and self.by_pairs:
            self.tally = self.split.tallied(self.tally)
        tally = self.tally.by_step(self.cohort)
        if self.split is None or (changes := self.split.changes) is None:
            return tally
        return replace(tally, sums=changes.sums(), moves=changes.moves())

    def rehomed(self, samples: SampleCounts | None) -> Tally:
        """The tally of the samples of complete steps, each where it is when a layer begins and when it ends."""
        moves_LI, step_U = self.journey.moves, self.cohort.step
        assert samples is not None
        assert moves_LI is not None
        assert step_U is not None
        traffic, index, counts = samples.under(self.journey.placement), samples.index, step_U >= 0
        place, step = self.cohort.unit_ids[counts], step_U[counts]
        _add(self.counts["tokens"], step, index.unit_tokens[place])
        for layer in range(self.tally.loads.shape[1]):
            ends = moves_LI[layer, place], moves_LI[layer + 1, place]
            copies, nodes = _listed(traffic.copies[place, layer]), _listed(traffic.nodes[place, layer])
            np.add.at(self.tally.loads[:, layer], step, traffic.pairs[place, layer].astype(np.int64))
            self._exchange(layer, copies, nodes, ends, step, step)
            if self.tally.sent is not None and samples.experts is not None:
                np.add.at(self.tally.sent[:, layer], (step, ends[0]), samples.experts[place, layer])
            self._attend(layer, ends[0], step, index.unit_tokens[place], index.contexts[place], padded=samples.padded)
        leaves_I = (moves_LI[1:, place] != moves_LI[:-1, place]).mean(axis=0)
        moved_B = [leaves_I[step == number].mean() for number in range(self.cohort.num_steps)]
        return replace(self.tally, moved=np.array(moved_B))

    def add_tokens(self, batch: TokenBatch, at: Located) -> None:
        """Take the tokens of a batch that belong to this part through every layer."""
        once = np.ones_like(at.position)
        here, before = at.home, np.full_like(at.home, -1)
        row = at.step if self.by_step else at.unit
        _add(self.counts["tokens"], row, once)
        for layer in range(len(self.holders)):
            device_RK = self._devices(batch, at, layer, here)
            first = device_RK[:, 0]
            after = _first(device_RK, here) if self.journey.dispatch_model == "coherent" else here
            if self.tally.sent is not None:
                token, choice = np.nonzero((device_RK >= 0) & (at.step >= 0)[:, None])
                cell = at.step[token], here[token], batch.ids[at.rows[token], layer, choice]
                np.add.at(self.tally.sent[:, layer], cell, ONE)
            if self.waterfill is not None:
                device_RK = np.column_stack([device_RK, self.waterfill.devices_of(layer, device_RK, at)])
            self._exchange(layer, _visits(device_RK), _visits(device_RK // self.group), (here, after), at.step, row)
            self._sit(layer, here, at.step, once, 2 * at.position + 1)
            hop = (before >= 0) & (first >= 0)
            _add(self.counts["hops"], row, hop)
            _add(self.counts["hops_kept"], row, hop & (before == first))
            _add(self.counts["node_hops_kept"], row, hop & (before // self.group == first // self.group))
            token, choice = np.nonzero((device_RK >= 0) & (at.step >= 0)[:, None])
            np.add.at(self.tally.loads[:, layer], (at.step[token], device_RK[token, choice]), 1)
            here, before = after, first
        if self.tally.ports is not None and (home := self.tally.ports.home) is not None:
            away = (here != at.home) & (at.step >= 0)
            kind = (here // self.group != at.home // self.group)[away] * (home.shape[2] - 1)
            for way, device in enumerate((here, at.home)):
                np.add.at(home[:, 0, :, way], (at.step[away], kind, device[away]), 1)

    def count_sent(self, batch: TokenBatch, at: Located) -> None:
        """Count where the tokens of a batch go, for the shared experts that are dealt afterwards."""
        assert self.waterfill is not None
        for layer in range(len(self.holders)):
            self.waterfill.count(layer, self._devices(batch, at, layer, at.home), at)

    def _devices(self, batch: TokenBatch, at: Located, layer: int, here: Numbers) -> Numbers:
        """The device of every routed cell of a batch's next tokens, `[R, K]`, -1 where not routed."""
        ids = batch.ids[at.rows, layer]
        if self.split is not None:
            return self.split.devices_of(layer, ids, here, at.step)
        return devices_of(ids, self.holders[layer], self.journey.rule, here, at.turn, self.group)

    def _exchange(
        self, layer: int, copies: Visits, nodes: Visits, ends: tuple[Numbers, Numbers], step_R: Numbers, row_R: Numbers
    ) -> None:
        """Add the copies between rows' devices and where they are dispatched from and combined at.

        A token visits a node once or never; each row counts for `row_R`, -1 for nothing.
        """
        (row, device, number), (visitor, node, times_there) = copies, nodes
        phases = (0,) if ends[0] is ends[1] else (0, 1)  # where tokens return, a combine is a dispatch backwards
        for phase in phases:
            times, end, step = 3 - len(phases), ends[phase][row], step_R[row]
            away, far = device != end, device // self.group != end // self.group
            apart = node != ends[phase][visitor] // self.group
            _add(self.counts["device_copies"], row_R[row[away]], times * number[away])
            _add(self.counts["far_copies"], row_R[row[far]], times * number[far])
            _add(self.counts["node_copies"], row_R[visitor[apart]], times * times_there[apart])
            goes, stays = away & (step >= 0), ~away & (step >= 0)
            leaves, reaches = ((end[goes], device[goes]), (device[goes], end[goes]))[phase]
            if self.tally.ports is not None:
                ports = (self.tally.ports.dispatch, self.tally.ports.combined)[phase][:, layer]
                kind = far[goes] * (ports.shape[1] - 1)  # the only class of links, or one of two
                np.add.at(ports[:, :, 0], (step[goes], kind, leaves), number[goes])
                np.add.at(ports[:, :, 1], (step[goes], kind, reaches), number[goes])
                np.add.at(self.tally.ports.kept[:, layer, phase], (step[stays], end[stays]), number[stays])
            if self.tally.between is not None:
                np.add.at(self.tally.between, (leaves, reaches), number[goes])
                if len(phases) == 1:
                    np.add.at(self.tally.between, (reaches, leaves), number[goes])

    def _attend(
        self, layer: int, here_I: Numbers, step_I: Numbers, tokens_I: Numbers, contexts_I: Numbers, *, padded: bool
    ) -> None:
        """Add what attends on every device in every step: a call for every length, or for all samples, then padded."""
        ports = self.tally.ports
        assert ports is not None
        for step, device in sorted({*zip(step_I.tolist(), here_I.tolist(), strict=True)}):
            held = (step_I == step) & (here_I == device)
            number = 1 if not padded else int(held.sum())
            join = np.max if padded else np.sum
            ports.tokens[step, layer, device] = number * join(tokens_I[held])
            ports.contexts[step, layer, device] = number * join(contexts_I[held])
            if ports.calls is not None:
                ports.calls[step, layer, device] = 1 if padded else len({*tokens_I[held].tolist()})

    def _sit(self, layer: int, here_R: Numbers, step_R: Numbers, tokens_R: Numbers, contexts_R: Numbers) -> None:
        """Add tokens and their contexts where they are before a layer; once where they are at home before every one."""
        ports, at = self.tally.ports, step_R >= 0
        if ports is not None and layer < ports.tokens.shape[1]:
            for table, number_R in ((ports.tokens, tokens_R), (ports.contexts, contexts_R)):
                np.add.at(table[:, layer], (step_R[at], here_R[at]), number_R[at])


def _add(to: Numbers, row_R: Numbers, number_R: NDArray[np.integer | np.bool_]) -> None:
    """Add numbers to the rows that count."""
    counts = row_R >= 0
    to += np.bincount(row_R[counts], number_R[counts], len(to)).astype(np.int64)


def _first(device_RK: Numbers, here_R: Numbers) -> Numbers:
    """The device of the first routed choice of each row; where there is none, it stays."""
    first_R = here_R
    for column in device_RK.T[::-1]:
        first_R = np.where(column >= 0, column, first_R)
    return first_R


def _visits(device_RK: Numbers) -> Visits:
    """The visits of each token to devices, or nodes, each once; -1 is not routed."""
    sorted_RK = np.sort(device_RK, axis=1)
    row, place = np.nonzero(np.diff(sorted_RK, axis=1, prepend=-1))
    return row, sorted_RK[row, place], np.ones_like(row)


def _listed(number_RD: NDArray[np.integer]) -> Visits:
    """Visits of rows from their table."""
    row, device = np.nonzero(number_RD)
    return row, device, number_RD[row, device].astype(np.int64)
