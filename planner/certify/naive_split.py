"""Splits of steps over replicas, recounted and proved: what the naive replay goes by under the rules quota and lp.

Many splits are best alike. Of each step and layer the one that `solvers.quota` claims is proved here by what shares no
code with it: every pair is served once, by a holder; no device has more than a bound that holds for any split, of the
pairs that some devices alone can serve; and by quota the traffic is that of a linear programme, in all splits of a
short trace and in `PROVED` of a long one. Tokens then take turns, one at a time.

Legend: B steps; L MoE layers; E experts; D devices; P slots; R rows of tokens; K experts per token.
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...solvers.cost import inter_ratio
from ...solvers.quota import Holders, holders_of, least, nearest, split
from ...traces.count_form import CountTrace
from ..evaluate.cohort import Cohort
from ..evaluate.journey import Journey
from ..evaluate.scene import Scene
from ..evaluate.tally import Tally
from .naive_changes import NaiveChanges

PROVED = 500  # splits of a part and contender whose traffic is proved; they take some ms each
Numbers = NDArray[np.int64]
Turns = dict[tuple[int, int, int], list[int]]  # by step, expert and queue: devices, the next one last


class NaiveSplit:
    """Devices of every step's pairs under a journey, on one part of a trace, whose placement may change by step."""

    def __init__(self, scene: Scene, cohort: Cohort, journey: Journey, *, by_pairs: bool) -> None:
        self.journey, self.cohort, self.placement = journey, cohort, journey.placement
        by_loads = isinstance(scene.source, CountTrace) and not by_pairs
        self.near = journey.rule != "lp" and not by_loads
        self.node, self.top_k = scene.cluster.devices_per_node, scene.model.top_k
        self.group = self.node if self.near or by_pairs else scene.cluster.num_devices
        self.ratio = round(inter_ratio(scene.cluster))
        self.pairs = np.zeros((0,), np.int64) if by_loads else _count(scene, cohort)
        self.turns: list[Turns] = [defaultdict(list) for _ in range(self.placement.num_layers)]
        self.changes: NaiveChanges | None = None
        if journey.following is not None:
            run = journey.following.run(self.pairs[:-1], self.placement, self.node)
            self.changes = NaiveChanges(run.tables, run.period, self.placement.num_experts, scene.cluster)
        self.claimed, self.one_in = 0, -(-max(self.cohort.num_steps * self.placement.num_layers, 1) // PROVED)
        self._holders = dict[bytes, Holders]()

    def holders(self, step: int, layer: int) -> Holders:
        """Holders of a layer's experts at a step; after the last step as in it."""
        if self.changes is None:
            row_P, slots_D = self.placement.physical_to_logical[layer], self.placement.slots
        else:
            table_DS = self.changes.table(step, layer)
            row_P, slots_D = table_DS[table_DS >= 0], (table_DS >= 0).sum(axis=1)
        key = row_P.tobytes() + slots_D.tobytes()
        if key not in self._holders:
            self._holders[key] = holders_of(row_P, slots_D, self.placement.num_experts, self.group)
        return self._holders[key]

    def deal(self) -> None:
        """Prove every split, and give every expert and queue of a step its devices in turn."""
        for layer, turns in enumerate(self.turns):
            for step, pairs_ED in enumerate(self.pairs[:, layer]):
                holders = self.holders(step, layer)
                dealt_PQ = self._dealt(pairs_ED, holders)
                for expert, (first, end) in enumerate(zip(holders.first[:-1], holders.first[1:], strict=True)):
                    devices = holders.device[first:end].tolist()
                    for queue, shares in enumerate(dealt_PQ[first:end].T.tolist()):
                        turns[step, expert, queue] = _in_turn(devices, shares)[::-1]

    def tallied(self, tally: Tally) -> Tally:
        """A tally of nothing with the pairs of counts, each a copy where it leaves its source."""
        for layer, step in np.ndindex(tally.loads.shape[1], tally.loads.shape[0]):
            pairs_ED, holders = self.pairs[step, layer], self.holders(step, layer)
            slot, source = np.nonzero(dealt_PD := self._dealt(pairs_ED, holders, by_source=True))
            number, device = dealt_PD[slot, source], holders.device[slot]
            np.add.at(tally.loads[step, layer], device, number)
            if tally.ports is None:
                continue
            stays, far = source == device, source // self.node != device // self.node
            np.add.at(tally.ports.kept[step, layer, 0], device[stays], number[stays])
            ports = tally.ports.dispatch[step, layer]
            kind = far[~stays] * (len(ports) - 1)
            np.add.at(ports[:, 0], (kind, source[~stays]), number[~stays])
            np.add.at(ports[:, 1], (kind, device[~stays]), number[~stays])
            if layer == 0:
                tally.ports.tokens[step, 0] = pairs_ED.sum(axis=0) // self.top_k
        return tally

    def devices_of(self, layer: int, ids_RK: NDArray[np.integer], here_R: Numbers, row_R: Numbers) -> Numbers:
        """The device that every routed cell goes to `[R, K]`, -1 where not routed, of rows of a tally."""
        step_M = np.append(self.cohort.step_of_row, self.cohort.num_steps)
        device_RK, turns = np.full(ids_RK.shape, -1), self.turns[layer]
        for row, choice in np.argwhere(ids_RK < self.placement.num_experts).tolist():
            queue = int(here_R[row]) if self.near else 0
            device_RK[row, choice] = turns[int(step_M[row_R[row]]), int(ids_RK[row, choice]), queue].pop()
        return device_RK

    def loads_of(self, layer: int, loads_ME: Numbers) -> NDArray[np.float64]:
        """Loads of devices `[M, D]` of rows of loads `[M, E]`, each of which its step splits in proportion."""
        holders, num_devices = self.holders(0, layer), self.placement.num_devices
        load_MD = np.zeros((len(loads_ME), num_devices))
        for step in range(self.cohort.num_steps):
            rows = np.flatnonzero(self.cohort.step_of_row == step)
            total_E = loads_ME[rows].sum(axis=0)
            for slot, served in enumerate(self._claimed(total_E[:, None], holders)[:, 0].tolist()):
                expert = holders.expert[slot]
                if served:
                    load_MD[rows, holders.device[slot]] += loads_ME[rows, expert] * (served / total_E[expert])
        return load_MD

    def _dealt(self, pairs_ED: Numbers, holders: Holders, *, by_source: bool = False) -> Numbers:
        """Pairs that every slot serves of each queue by the journey's rule, `[P, Q]`; `by_source`: of each source."""
        if self.journey.rule == "lp" and by_source:
            return _in_proportion(pairs_ED, self._claimed(pairs_ED, holders)[:, 0], holders)
        if self.journey.rule in ("quota", "lp"):
            return self._claimed(pairs_ED, holders)
        dealt_PD = np.zeros((len(holders.device), pairs_ED.shape[1]), np.int64)
        for expert, (first, end) in enumerate(zip(holders.first[:-1], holders.first[1:], strict=True)):
            share = _in_capacity if self.journey.rule == "capacity" else _round_and_round
            dealt_PD[first:end] = share(pairs_ED[expert].tolist(), holders.device[first:end].tolist())
        return dealt_PD

    def _claimed(self, pairs_ED: Numbers, holders: Holders) -> Numbers:
        """The split of a layer and step that is claimed, proved, `[P, Q]`: Q sources, or 1 for all of them."""
        total_E = pairs_ED.sum(axis=1)
        most, proving_D, _ = least(total_E, holders)
        if self.near:
            dealt_PQ, _ = split(pairs_ED, holders, self.ratio)
        else:
            nowhere = np.zeros((len(total_E), self.placement.num_devices), np.int64)
            dealt_PQ, pairs_ED = nearest(nowhere, total_E, holders, most, 1)[:, None], total_E[:, None]
        served_EQ = np.zeros_like(pairs_ED)
        np.add.at(served_EQ, holders.expert, dealt_PQ)
        alone_E = np.ones(len(total_E), np.bool_)  # experts that the proving devices alone can serve
        np.logical_and.at(alone_E, holders.expert, proving_D[holders.device])
        load_D = np.bincount(holders.device, dealt_PQ.sum(axis=1), self.placement.num_devices)
        if (dealt_PQ < 0).any() or (served_EQ != pairs_ED).any():
            raise CertificationError("a split of a step serves more or fewer pairs than there are")
        if load_D.max() > -(-int(total_E[alone_E].sum()) // max(int(proving_D.sum()), 1)):
            raise CertificationError("a split of a step loads a device more than it must")
        self.claimed += 1
        proved = self.near and self.claimed % self.one_in == 0
        if proved and self._traffic(dealt_PQ, holders) > self._least_traffic(pairs_ED, holders, most) + 0.5:
            raise CertificationError("a split of a step sends more pairs than it must")
        return dealt_PQ

    def _prices(self, holders: Holders) -> Numbers:
        """Cost of a pair from every source at every slot, `[P, D]`."""
        source_D = np.arange(self.placement.num_devices)
        crosses_PD = holders.device[:, None] // self.group != source_D // self.group
        return np.where(holders.device[:, None] == source_D, 0, np.where(crosses_PD, self.ratio, 1))

    def _traffic(self, dealt_PD: Numbers, holders: Holders) -> int:
        return int((dealt_PD * self._prices(holders)).sum())

    def _least_traffic(self, pairs_ED: Numbers, holders: Holders, most: int) -> float:
        """The traffic of the cheapest split with no device above `most`, fractions allowed."""
        from scipy.optimize import linprog
        from scipy.sparse import coo_array

        expert, source = np.nonzero(pairs_ED)
        flow, slot = np.nonzero(expert[:, None] == holders.expert)
        if not len(flow):
            return 0.0
        column, once = np.arange(len(flow)), np.ones(len(flow))
        served = coo_array((once, (flow, column)), (len(expert), len(flow)))
        load = coo_array((once, (holders.device[slot], column)), (pairs_ED.shape[1], len(flow)))
        price, limit = self._prices(holders)[slot, source[flow]], np.full(pairs_ED.shape[1], most)
        return float(linprog(price, load, limit, served, pairs_ED[expert, source], method="highs").fun)


def _count(scene: Scene, cohort: Cohort) -> Numbers:
    """Pairs of every step and source, then of all that are in no step, `[B + 1, L, E, D]`."""
    model, size = scene.source.meta.model, scene.cluster.num_devices
    pairs = np.zeros((cohort.num_steps + 1, model.num_layers, model.num_experts, size), np.int64)
    step_M = np.append(cohort.step_of_row, cohort.num_steps)
    if isinstance(scene.source, CountTrace):
        for table in scene.source.tables():
            rows, row_R = cohort.locate_rows(scene.index.rows(table))
            for row, step in zip(rows.tolist(), step_M[row_R].tolist(), strict=True):
                layer, counts_E = table.layer[row], table.counts[row]
                if cohort.ranked and table.source_rank is not None:
                    pairs[step, layer, :, table.source_rank[row]] += counts_E
                    continue
                for expert, count in enumerate(counts_E.tolist()):  # dealt round, from another device on for each
                    for device in range(size):
                        pairs[step, layer, expert, device] += (count + (device - expert) % size) // size
        return pairs
    for batch, unit_T in scene.index.batches(scene.source, scene.phases or None):
        at = cohort.locate(batch, unit_T)
        for layer in range(model.num_layers):
            for column in batch.ids[at.rows, layer].T:
                known = column < model.num_experts
                np.add.at(pairs[:, layer], (step_M[at.step[known]], column[known], at.home[known]), 1)
    return pairs


def _round_and_round(pairs: list[int], devices: list[int]) -> Numbers:
    """Shares `[n, D]` of an expert's holders, each source's pairs going round them, from holder g on for source g."""
    shares = np.zeros((len(devices), len(pairs)), np.int64)
    for source, number in enumerate(pairs):
        each, left = divmod(number, len(devices))
        shares[:, source] = each
        for turn in range(left):
            shares[(source + turn) % len(devices), source] += 1
    return shares


def _in_capacity(pairs: list[int], devices: list[int]) -> Numbers:
    """Shares `[n, D]` of an expert's holders by FlexMoE's Algorithm 3: equal capacities, own pairs first."""
    shares = np.zeros((len(devices), len(pairs)), np.int64)
    each, more = divmod(sum(pairs), len(devices))
    left, rest = [each + (place < more) for place in range(len(devices))], list(pairs)
    for place, device in enumerate(devices):
        own = min(left[place], pairs[device])
        shares[place, device] = own
        left[place] -= own
        rest[device] -= own
    for source, number in enumerate(rest):
        if number <= 0:
            continue
        ends = np.cumsum(left) * number // max(sum(left), 1)
        for place, some in enumerate(np.diff(ends, prepend=0).tolist()):
            shares[place, source] += some
            left[place] -= some
    return shares


def _in_proportion(pairs_ED: Numbers, served_P: Numbers, holders: Holders) -> Numbers:
    """Shares `[P, D]` of each source's pairs in proportion to what slots serve, rounded along an expert's holders."""
    shares = np.zeros((len(served_P), pairs_ED.shape[1]), np.int64)
    for expert, (first, end) in enumerate(zip(holders.first[:-1], holders.first[1:], strict=True)):
        ends_nD = np.cumsum(served_P[first:end])[:, None] * pairs_ED[expert] // max(int(pairs_ED[expert].sum()), 1)
        shares[first:end] = np.diff(ends_nD, axis=0, prepend=0)
    return shares


def _in_turn(devices: list[int], shares: list[int]) -> list[int]:
    """Devices one after the other, always the one furthest behind its share, the first of equals."""
    if len(devices) == 1:
        return devices * shares[0]
    given, number, order = [0] * len(devices), sum(shares), list[int]()
    for turn in range(1, number + 1):
        behind = [share * turn - number * had for share, had in zip(shares, given, strict=True)]
        place = behind.index(max(behind))
        given[place] += 1
        order.append(devices[place])
    return order
