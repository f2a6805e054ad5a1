"""Seconds of FlexMoE's exact split of a step, and of its decisions, on layers whose loads drift; on one thread.

Legend: E experts; D devices in nodes of G, S slots of each; P slots; W records.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import eplb
from moeplan.solvers.flexmoe import Policy, Seen
from moeplan.solvers.flexmoe.follow import first_homes
from moeplan.solvers.flexmoe.rivals import eplb_table

from ..race import race
from ..study import Row, Settings, Study
from .flexmoe import COSTS, PAIRS

Array = np.ndarray
RATIO = 7  # of what a pair costs that crosses nodes
WINDOW = 4  # records that the policy plans for
DRIFT = 0.15 / np.sqrt(WINDOW)  # of a record, log-normal: from the first record to the last 15 %
STACK = 58  # MoE layers of DeepSeek-V3
MOST_ARCS = 50_000  # of a flow that is timed
GROWN = (16, 32, 64, 128, 256, 512)
LEAST, NEAR, DEALT, LP, FLOW = "split", "split + traffic", "split + traffic + deal", "LP (HiGHS)", "flow (OR-Tools)"
FEW, BALANCE, SECONDS, EPLB = "operations, last record", "balance alone", "by seconds", "EPLB refined, matched"


@dataclass(frozen=True, slots=True)
class Layers:
    """So many layers of one size."""

    experts: int
    devices: int
    group: int
    slots: int
    number: int
    axis: str = ""

    @property
    def name(self) -> str:
        """The size in words."""
        nodes = f" in {self.devices // self.group} nodes" if self.group < self.devices else ""
        return f"{self.experts} experts, {self.devices} devices{nodes}, {self.slots} slots"

    def drawn(self) -> Iterator[tuple[Array, Array]]:
        """Of every layer pairs by record, expert and source `[W, E, D]`, and EPLB's table of the record before."""
        for seed in range(self.number):
            rng, share = np.random.default_rng(seed), 1 / np.arange(1, self.experts + 1) ** 1.26
            share, records = rng.permutation(share), []
            for _ in range(1 + WINDOW):
                records.append(rng.multinomial(PAIRS, share / share.sum(), size=self.devices).T)
                share = share * np.exp(rng.normal(0, DRIFT, self.experts))
            loads = records[0].sum(axis=1).astype(np.float64)[None]
            placed = eplb.solve(loads, Cluster(1, self.devices), slots=self.slots, method="published").placement
            table = placed.physical_to_logical.astype(np.int64).reshape(self.devices, self.slots)
            yield np.stack(records[1:]).astype(np.int64), table


def _sizes(settings: Settings) -> Iterator[Layers]:
    number = 2 if settings.quick else 12
    yield from (Layers(32, 16, group, slots, number) for group in (16, 4) for slots in (3, 4, 8))
    yield from (Layers(256, 64, 8, slots, number) for slots in (5, 6))
    yield Layers(32, 1024, 8, 2, min(number, 3))


def _grown(settings: Settings) -> Iterator[Layers]:
    for devices in GROWN[: 2 if settings.quick else None]:
        yield Layers(2 * devices, devices, 8, 3, 3, "devices, 2 experts and 3 slots of each")


def _split_rows(layers: Layers) -> Iterator[Row]:
    """The exact split of every layer's last record, beside a linear programme and a flow."""
    from moeplan.solvers.flexmoe.state import holders_in
    from moeplan.solvers.quota import least, shares, split

    timed: dict[str, list[float]] = {}
    found: dict[str, list[tuple[float, float]]] = {}  # the busiest device over the mean, and traffic
    for window, table in layers.drawn():
        pairs, total = window[-1], window[-1].sum(axis=1)
        holders = holders_in(table, layers.experts, layers.group)
        most = least(total, holders)[0]

        calls: dict[str, Callable[[], Any]] = {
            LEAST: partial(least, total, holders),
            NEAR: partial(shares, pairs, holders, RATIO),
            DEALT: partial(split, pairs, holders, RATIO),
        }
        if not layers.axis:
            calls[LP] = partial(_programme, total, holders)
        if not layers.axis and table.size * layers.devices <= MOST_ARCS:
            flow = _flow(pairs, holders, most, layers.group)
            calls[FLOW] = flow.solve
        mean = total.sum() / layers.devices
        for method, timing in race(calls, budget_s=0.3, memory=False).items():
            timed.setdefault(method, []).append(timing.seconds)
            crossing = np.nan
            if method == DEALT:
                crossing = _traffic(timing.value[0], holders, layers.group)
            elif method == FLOW:
                assert timing.value == flow.OPTIMAL
                crossing = flow.optimal_cost()
            reached = timing.value if method == LP else most
            found.setdefault(method, []).append((reached / mean, crossing))
    for method, own_s in timed.items():
        ratio, crossing = np.mean(found[method], axis=0)
        more = {"slowest, s": max(own_s), "layers": float(len(own_s))}
        if method in (LP, FLOW):
            theirs = np.array(found[method])[:, int(method == FLOW)]
            ours = np.array(found[DEALT])[:, int(method == FLOW)]
            more["layers that differ"] = float((np.abs(theirs - ours) > 1e-9).sum())
        if not np.isnan(crossing):
            more["traffic, pairs"] = float(crossing)
        base = timed[FLOW if FLOW in timed else LP] if not layers.axis else None
        yield Row(
            layers.name,
            method,
            quality=float(ratio),
            bound=float(np.mean(found[LP], axis=0)[0]) if LP in found else None,
            seconds=float(np.median(own_s)),
            ratio=float(np.median(np.divide(base, own_s))) if base else None,
            more=more,
            axis=layers.axis,
            size=layers.devices if layers.axis else None,
        )


def _programme(total: Array, holders: Any) -> int:
    """The load of the busiest device, of whole pairs, by a linear programme over the slots."""
    slots, num_devices = np.arange(len(holders.device)), len(holders.held_first) - 1
    shape = len(slots) + 1
    served = csr_array((np.ones(len(slots)), (holders.expert, slots)), shape=(len(total), shape))
    rows, columns = np.append(holders.device, range(num_devices)), np.append(slots, np.full(num_devices, len(slots)))
    values = np.append(np.ones(len(slots)), np.full(num_devices, -1.0))
    load = csr_array((values, (rows, columns)), shape=(num_devices, shape))
    most = linprog(np.append(np.zeros(len(slots)), 1.0), load, np.zeros(num_devices), served, total).fun
    return int(np.ceil(most - 1e-6))


def _flow(pairs: Array, holders: Any, most: int, group: int) -> Any:
    """The flow of least traffic with an arc for every expert, source and holder, none over `most`; not yet solved."""
    from ortools.graph.python.min_cost_flow import SimpleMinCostFlow

    graph, num_devices = SimpleMinCostFlow(), pairs.shape[1]
    sources = np.arange(num_devices)
    tail = (holders.expert[:, None] * num_devices + sources).ravel()
    head = np.repeat(pairs.size + holders.device, num_devices)
    graph.add_arcs_with_capacity_and_unit_cost(
        tail, head, pairs[holders.expert].ravel(), _prices(holders, num_devices, group).ravel()
    )
    end = np.full(num_devices, pairs.size + num_devices)
    limits = np.full(num_devices, most)
    graph.add_arcs_with_capacity_and_unit_cost(pairs.size + sources, end, limits, np.zeros(num_devices, np.int64))
    graph.set_nodes_supplies(np.arange(pairs.size), pairs.ravel())
    graph.set_nodes_supplies(end[:1], np.array([-pairs.sum()]))
    return graph


def _traffic(dealt: Array, holders: Any, group: int) -> int:
    return int((dealt * _prices(holders, dealt.shape[1], group)).sum())


def _prices(holders: Any, num_devices: int, group: int) -> Array:
    """Cost of a pair by slot and source, `[P, D]`."""
    at, source = holders.device[:, None], np.arange(num_devices)
    return np.where(at == source, 0, np.where(at // group == source // group, 1, RATIO))


def _decided(settings: Settings) -> Iterator[Layers]:
    number = 2 if settings.quick else STACK
    yield from (Layers(256, 64, 8, slots, number) for slots in (6, 5))
    yield Layers(32, 1024, 8, 2, min(number, 6))


def _decision_rows(layers: Layers) -> Iterator[Row]:
    """Every way to decide on every layer's last records."""
    from moeplan.solvers.flexmoe.cuts import busiest_ratio, guided
    from moeplan.solvers.flexmoe.policy import held_by, pays, planned

    policy = Policy()

    def decided(seen: Seen, evaluations: int) -> Array:
        """The policy's table once it is triggered."""
        new = planned(seen, policy, evaluations)
        return new if pays(new, seen, policy) else seen.table

    timed: dict[str, list[float]] = {}
    found: dict[str, list[tuple[float, float, float]]] = {}
    for layer, (window, table) in zip(count(), layers.drawn(), strict=False):
        batches, totals = window[:, None], window.sum(axis=2)
        home = first_homes(table, layers.experts)
        seen = Seen.of(0, layer, batches, table, home, group=layers.group, costs=COSTS)
        gain_s = COSTS.pair_s * totals[-1].sum() / layers.devices * policy.horizon
        cell_s, free = COSTS.moved_bytes * COSTS.intra_sum_s_per_byte, np.zeros_like(held_by(table, seen))
        last, slots = totals[-1:], layers.slots
        calls: dict[str, Callable[[], Any]] = {
            EPLB: partial(eplb_table, batches[-1:], slots, "refined", table),
            FEW: partial(guided, table, last, free, policy.slack, gain_s, cell_s, policy.quantile),
            BALANCE: partial(decided, seen, 0),
            SECONDS: partial(decided, seen, policy.evaluations),
        }
        for method, timing in race(calls, rounds=1, memory=False).items():
            new = timing.value[0] if method == FEW else timing.value
            gained = held_by(new, seen) & ~held_by(table, seen)
            timed.setdefault(method, []).append(timing.seconds)
            found.setdefault(method, []).append((busiest_ratio(new, last), seen.balance, gained.sum()))
    for method, own_s in timed.items():
        after, before, moved = np.mean(found[method], axis=0)
        yield Row(
            layers.name,
            method,
            quality=float(after),
            bound=1.0,
            seconds=float(np.median(own_s)),
            ratio=float(np.median(np.divide(timed[EPLB], own_s))),
            more={
                "slowest, s": max(own_s),
                "layers": float(len(own_s)),
                "all layers, s": sum(own_s),
                "before": float(before),
                "experts moved": float(moved),
            },
        )


STUDIES = (
    Study(
        title="The exact split of a step",
        quality="busiest / mean",
        baseline=FLOW,
        instances=_sizes,
        rows=_split_rows,
        note="CPU seconds of the split of one layer's step, median and slowest of several layers."
        f" The split finds the least load of the busiest device (bound: {LP}, an unknown a slot), then with traffic the"
        " shares of least traffic under it, then deals them to sources; every row includes those above it."
        f" {FLOW}: the flow of least traffic with an arc for every expert, source and holder, solving alone, without"
        f" building it; x base is to {LP} where that has more than {MOST_ARCS:,} arcs. Layers that differ: in the least"
        " load from the programme, in traffic from the flow. A pair that crosses nodes counts"
        f" {RATIO} times one that crosses devices. Loads: Zipf's with exponent 1.26, {PAIRS:,} pairs a device, in the"
        " placement of EPLB 15 % (log-normal) of drift ago.",
    ),
    Study(
        title="A decision",
        quality="busiest / mean",
        baseline=EPLB,
        instances=_decided,
        rows=_decision_rows,
        note="CPU seconds of one layer's decision, median and slowest of several layers, and their sum."
        f" {FEW}: the few operations that pay, of the cut in the load's way, for one record. {BALANCE}: what the policy"
        f" decides for a window of {WINDOW} records; where operations that pay leave the load out of balance, as many"
        f" as settle it, from there and from EPLB's placement, with kicks. {SECONDS}: the same, then"
        f" {Policy().evaluations} evaluations of predicted seconds. All start from EPLB's placement of 15 %"
        " (log-normal) of drift ago, whose balance is in the column before; every new replica brings its state along."
        " Balance: of the last record.",
    ),
    Study(
        title="Growth of the split",
        quality="busiest / mean",
        instances=_grown,
        rows=_split_rows,
        note="CPU seconds of the split by number of devices, median and slowest of three layers. Loads as above, nodes"
        " of 8.",
    ),
)
