"""Who is in a trace and what each sends, counted again: the naive twin of `planner.netmoe.roll` and `.counted`.

Legend: I samples (one in two steps counts twice); R rows; T tokens; L MoE layers; E experts; K experts a token;
D devices; N nodes.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...runtime.plan import Plan
from ...traces.count_form import CountTable, CountTrace
from ...traces.reader import Trace
from ...traces.schema import TokenBatch
from .structure import Holders, evaluation_options

__all__ = ["Census", "Class", "Sent", "take_census"]

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sent:
    """Under one placement: copies to and pairs on devices `[I, L, D]`, visits of nodes `[I, L, N]`, and how often
    fitted tokens go from an expert to a device `[L-1, E, D]`.
    """

    copies: Numbers
    nodes: Numbers
    pairs: Numbers
    linked: Numbers


@dataclass(frozen=True, slots=True)
class Class:
    """Some samples as they run: their ordinals in the census, step (-1: incomplete), home, and the number of steps."""

    members: Numbers
    step: Numbers
    home: Numbers
    num_steps: int


@dataclass(frozen=True, slots=True)
class Census:
    """Everybody in a trace by (step, sample), with the rank, tokens and contexts of each, its pairs with the experts
    `[I, L, E]`, what it sends under each placement, and whether it is fitted.
    """

    names: list[tuple[int, int]]
    rank: Numbers
    tokens: Numbers
    contexts: Numbers
    experts: Numbers
    sent: Mapping[str, Sent]
    fitted: NDArray[np.bool_]
    unit: str
    has_steps: bool
    by_tokens: bool

    def classed(self, plan: Plan, *, fit: bool) -> Class:
        """The fitted or held-out samples as they run on the plan's cluster."""
        size, each = plan.cluster.num_devices, evaluation_options(plan).samples_per_step
        members = [ordinal for ordinal in range(len(self.names)) if self.fitted[ordinal] == fit]
        recorded = self.rank.max(initial=-1) + 1 == size
        home = [int(self.rank[one]) if recorded else place % size for place, one in enumerate(members)]
        if self.has_steps:
            order = {name: index for index, name in enumerate(sorted({self.names[one][0] for one in members}))}
            step, count = [order[self.names[one][0]] for one in members], len(order)
        else:
            count = max(len(members) // each, 1)
            step = [place // each if place // each < count else -1 for place in range(len(members))]
        return Class(np.array(members, int), np.array(step, int), np.array(home, int), count)

    @property
    def recorded_home(self) -> int:
        """Source ranks recorded, 0 without."""
        return int(self.rank.max(initial=-1)) + 1


def take_census(trace: Trace | CountTrace, plan: Plan, placements: Mapping[str, Holders]) -> Census:
    """Count everybody in two passes: who there is, then what they send."""
    assert plan.inputs.trace is not None
    model, phases = plan.model, evaluation_options(plan).phases
    rank_of: dict[tuple[int, int], int] = {}
    for rows, keys in _rows(trace, phases, layers=False):
        ranks = [-1] * len(keys) if rows.source_rank is None else rows.source_rank.tolist()
        rank_of.update(zip(keys, ranks, strict=True))
    names = sorted(rank_of)
    ordinal = {name: index for index, name in enumerate(names)}
    alone = len({sample for _, sample in names}) == len(names)
    unit = "step" if "step" in trace.known and alone else "sample"
    split = plan.inputs.trace.split
    limit = int(split.fit_fraction * 2**64)
    fitted = [_hash(f"{split.seed}:{name[unit == 'sample']}") < limit for name in names]
    shape = (len(names), model.num_layers)
    census = Census(
        names,
        np.array([rank_of[name] for name in names]),
        np.zeros(len(names), np.int64),
        np.zeros(len(names), np.int64),
        np.zeros((*shape, model.num_experts), np.int64),
        {name: _nothing(plan, shape) for name in placements},
        np.array(fitted),
        unit,
        "step" in trace.known,
        isinstance(trace, Trace),
    )
    for rows, keys in _rows(trace, phases, layers=True):
        who = np.array([ordinal[key] for key in keys])
        if isinstance(rows, CountTable):
            _add_counts(census, who, rows, placements)
        else:
            _add_tokens(census, who, rows, placements, plan)
    if not census.by_tokens:
        census.tokens[:] = census.experts.sum(axis=2).max(axis=1) // model.top_k
        census.contexts[:] = census.tokens * census.tokens
    return census


def _nothing(plan: Plan, shape: tuple[int, int]) -> Sent:
    cluster, model = plan.cluster, plan.model
    widths = (cluster.num_devices, cluster.num_nodes, cluster.num_devices)
    copies, nodes, pairs = (np.zeros((*shape, width), np.int64) for width in widths)
    return Sent(copies, nodes, pairs, np.zeros((shape[1] - 1, model.num_experts, cluster.num_devices), np.int64))


def _rows(
    trace: Trace | CountTrace, phases: tuple[str, ...], *, layers: bool
) -> Iterator[tuple[TokenBatch | CountTable, list[tuple[int, int]]]]:
    """Rows of a trace with the (step, sample) of each."""
    source = (
        trace.tables()
        if isinstance(trace, CountTrace)
        else trace.batches(None if layers else (), phases=phases or None)
    )
    for rows in source:
        assert rows.sample is not None
        steps = [0] * len(rows) if rows.step is None else rows.step.tolist()
        yield rows, list(zip(steps, rows.sample.tolist(), strict=True))


def _add_counts(census: Census, who: Numbers, rows: CountTable, placements: Mapping[str, Holders]) -> None:
    np.add.at(census.experts, (who, rows.layer), rows.counts)
    for name, holders in placements.items():
        sent = census.sent[name]
        group = sent.copies.shape[2] // sent.nodes.shape[2]
        for layer, held in enumerate(holders):
            here = rows.layer == layer
            for expert, (device,) in enumerate(held):  # no replicas
                for to in (sent.copies[:, layer, device], sent.pairs[:, layer, device]):
                    np.add.at(to, who[here], rows.counts[here, expert])
                np.add.at(sent.nodes[:, layer, device // group], who[here], rows.counts[here, expert])


def _add_tokens(census: Census, who: Numbers, rows: TokenBatch, placements: Mapping[str, Holders], plan: Plan) -> None:
    assert rows.sample is not None
    np.add.at(census.tokens, who, 1)
    np.add.at(census.contexts, who, 2 * rows.position.astype(np.int64) + 1)
    turn = rows.sample + rows.position
    for layer in range(plan.model.num_layers):
        ids_TK = rows.ids[:, layer].astype(np.int64)
        token, choice = np.nonzero(ids_TK < plan.model.num_experts)
        np.add.at(census.experts[:, layer], (who[token], ids_TK[token, choice]), 1)
        for name, holders in placements.items():
            sent = census.sent[name]
            device = _devices(holders[layer], ids_TK[token, choice], turn[token])
            np.add.at(sent.pairs[:, layer], (who[token], device), 1)
            for to, width in ((sent.copies, 1), (sent.nodes, plan.cluster.devices_per_node)):
                visited = np.zeros((len(who), to.shape[2]), dtype=bool)
                visited[token, device // width] = True
                at, place = np.nonzero(visited)
                np.add.at(to[:, layer], (who[at], place), 1)
                if layer and to is sent.copies:
                    _link(sent.linked[layer - 1], rows.ids[:, layer - 1], visited & census.fitted[who][:, None])


def _devices(holders: list[list[int]], expert: Numbers, turn: Numbers) -> Numbers:
    """The device of each pair, the replicas of an expert in turn."""
    device = np.array([held[0] for held in holders])[expert]
    for replicated in (e for e, held in enumerate(holders) if len(held) > 1):
        held, here = np.array(holders[replicated]), expert == replicated
        device[here] = held[turn[here] % len(held)]
    return device


def _link(linked_ED: Numbers, before_TK: NDArray[np.uint16], visited_TD: NDArray[np.bool_]) -> None:
    """Add, for each of a token's experts, the devices that it visits next."""
    for before_T in before_TK.T.astype(np.int64):
        token, device = np.nonzero(visited_TD & (before_T < len(linked_ED))[:, None])
        np.add.at(linked_ED, (before_T[token], device), 1)


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
