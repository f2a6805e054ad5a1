"""Splits of steps over replicas, recounted and proved: what the naive replay goes by under the rules quota and lp.

Many splits are best alike. Of each step and layer the one that `solvers.quota` claims is proved here by what shares no
code with it: every pair is served once, by a holder; no device has more than a bound that holds for any split, of the
pairs that some devices alone can serve; and by quota the traffic is that of a linear programme. Tokens then take turns,
one at a time.

Legend: B steps; L MoE layers; E experts; D devices; P slots; R rows of tokens; K experts per token.
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...solvers.cost import inter_ratio
from ...solvers.placement import Placement
from ...solvers.quota import Holders, holders_of, least, nearest, split
from ...traces.count_form import CountTrace
from ..evaluate.journey import Journey
from ..evaluate.scene import Scene
from ..evaluate.splits import Cohort

Numbers = NDArray[np.int64]
Turns = dict[tuple[int, int, int], list[int]]  # by step, expert and queue: devices, the next one last


class NaiveSplit:
    """Devices of every step's pairs under a journey, on one part of a trace."""

    def __init__(self, scene: Scene, cohort: Cohort, journey: Journey) -> None:
        self.journey, self.cohort, self.placement = journey, cohort, journey.placement
        self.near = journey.rule == "quota" and not isinstance(scene.source, CountTrace)
        self.group = scene.cluster.devices_per_node if self.near else scene.cluster.num_devices
        self.ratio = round(inter_ratio(scene.cluster))
        self.pairs = _count(scene, cohort)
        self.turns: list[Turns] = [defaultdict(list) for _ in range(self.placement.num_layers)]

    def deal(self) -> None:
        """Prove every split, and give every expert and queue of a step its devices in turn."""
        for layer, turns in enumerate(self.turns):
            holders = _holders(self.placement, layer, self.group)
            for step, pairs_ED in enumerate(self.pairs[:, layer]):
                dealt_PQ = self._claimed(pairs_ED, holders)
                for expert, (first, end) in enumerate(zip(holders.first[:-1], holders.first[1:], strict=True)):
                    devices = holders.device[first:end].tolist()
                    for queue, shares in enumerate(dealt_PQ[first:end].T.tolist()):
                        turns[step, expert, queue] = _in_turn(devices, shares)[::-1]

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
        holders, num_devices = _holders(self.placement, layer, self.group), self.placement.num_devices
        load_MD = np.zeros((len(loads_ME), num_devices))
        for step in range(self.cohort.num_steps):
            rows = np.flatnonzero(self.cohort.step_of_row == step)
            total_E = loads_ME[rows].sum(axis=0)
            for slot, served in enumerate(self._claimed(total_E[:, None], holders)[:, 0].tolist()):
                expert = holders.expert[slot]
                if served:
                    load_MD[rows, holders.device[slot]] += loads_ME[rows, expert] * (served / total_E[expert])
        return load_MD

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
        if self.near and self._traffic(dealt_PQ, holders) > self._least_traffic(pairs_ED, holders, most) + 0.5:
            raise CertificationError("a split of a step sends more pairs than it must")
        return dealt_PQ

    def _prices(self, holders: Holders) -> Numbers:
        """What a pair from every source costs at every slot, `[P, D]`."""
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
    """Pairs of every step and source, then of all that are in no step, `[B + 1, L, E, D]`; nothing of counts."""
    model, size = scene.source.meta.model, scene.cluster.num_devices
    if isinstance(scene.source, CountTrace):
        return np.zeros((0, model.num_layers, model.num_experts, size), np.int64)
    pairs = np.zeros((cohort.num_steps + 1, model.num_layers, model.num_experts, size), np.int64)
    step_M = np.append(cohort.step_of_row, cohort.num_steps)
    for batch, unit_T in scene.index.batches(scene.source, scene.phases or None):
        at = cohort.locate(batch, unit_T)
        for layer in range(model.num_layers):
            for column in batch.ids[at.rows, layer].T:
                known = column < model.num_experts
                np.add.at(pairs[:, layer], (step_M[at.step[known]], column[known], at.home[known]), 1)
    return pairs


def _holders(placement: Placement, layer: int, group: int) -> Holders:
    return holders_of(placement.physical_to_logical[layer], placement.slots, placement.num_experts, group)


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
