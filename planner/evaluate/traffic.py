"""Traffic of every sample: to each expert, and under a placement to each device and node.

Legend: I samples of the index; T tokens; L MoE layers; E experts; K experts per token; B steps; D devices; N nodes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ...solvers.arrays import Bools, Floats, Ints
from ...solvers.placement import Placement, ReplicaRule
from ...solvers.ports import CLASSES, link_classes, remote_visits, sample_copies
from ...solvers.replicas import ReplicaTable
from ...traces.count_form import CountTrace
from ...traces.reader import Trace
from .cohort import Cohort
from .tally import COUNTS, Ports, Tally
from .units import SampleIndex

if TYPE_CHECKING:
    from .journey import Journey

MAX_CELLS = 2**28  # of 4 bytes


@dataclass(frozen=True, slots=True, eq=False)
class SampleTraffic:
    """Traffic of every sample under one placement."""

    placement: Placement  #: Its replicas, if any, are used evenly
    #: copies, nodes: copies of each sample to every device, one a token and distinct device, and tokens that visit each
    #: node, int32 `[I, L, D]` and `[I, L, N]`. Where only counts are known, one a token-expert pair.
    copies: NDArray[np.int32]
    nodes: NDArray[np.int32]
    pairs: NDArray[np.int32]  #: Token-expert pairs of each sample on every device, int32 `[I, L, D]`
    #: How often a fitted token goes from an expert of layer l to a device at l + 1, int64 `[L-1, E, D]`; None where
    #: only counts are known
    linked: Ints | None

    @classmethod
    def empty(cls, placement: Placement, num_samples: int, cluster: Cluster, *, linked: bool) -> Self:
        """Table of zeros for one placement."""
        layers, devices = placement.num_layers, cluster.num_devices
        copies = np.zeros((num_samples, layers, devices), np.int32)
        nodes = np.zeros((num_samples, layers, cluster.num_nodes), np.int32)
        if not linked:
            return cls(placement, copies, nodes, copies, None)
        from_experts = np.zeros((layers - 1, placement.num_experts, devices), np.int64)
        return cls(placement, copies, nodes, np.zeros_like(copies), from_experts)

    def following(self, layer: int, place: Ints) -> Floats | None:
        """Copies that the samples at these indices send at the next layer, `[I, D]`. None after the last layer."""
        after = layer + 1
        return self.copies[place, after].astype(np.float64) if after < self.copies.shape[1] else None


class SampleCounts:
    """Traffic of every sample of a trace, counted once under each placement that is requested.

    The tokens of `fitted` samples, `[I]`, link layers (`SampleTraffic.linked`); None: of none.
    """

    def __init__(
        self,
        trace: Trace | CountTrace,
        index: SampleIndex,
        fitted: Bools | None,
        cluster: Cluster,
        *,
        phases: Collection[str] | None = None,
        counter: "Counter | None" = None,
        padded: bool = False,
    ) -> None:
        self.trace, self.index, self.cluster, self.phases = trace, index, cluster, phases
        self.padded = padded  #: Whether a device's samples attend in a batch, padded to its longest
        self.fitted = np.zeros(len(index.sample), np.bool_) if fitted is None else fitted
        self.experts: NDArray[np.int32] | None = None  #: Pairs of each sample with every expert, `[I, L, E]`
        self._counter, self._known = counter or walk_samples, list[SampleTraffic]()

    def under(self, placement: Placement) -> SampleTraffic:
        """Traffic under one placement."""
        return self.count({"plan's": placement})[0]

    def count(self, placements: Mapping[str, Placement]) -> list[SampleTraffic]:
        """Traffic under each of several placements. New placements are counted in one pass over the trace.

        UsageError where the tables would pass 2^28 cells, or the use of replicas depends on where samples are.
        """
        new = {name: one for name, one in placements.items() if self._traffic(one) is None}
        if new:
            self._check(new)
            self.experts, known = self._counter(self, [*new.values()])
            self._known += known
        return [traffic for one in placements.values() if (traffic := self._traffic(one)) is not None]

    def _traffic(self, placement: Placement) -> SampleTraffic | None:
        return next((traffic for traffic in self._known if traffic.placement.sends_as(placement)), None)

    def _check(self, new: Mapping[str, Placement]) -> None:
        model, devices, num_samples = self.trace.meta.model, self.cluster.num_devices, len(self.index.sample)
        places = 2 * devices + self.cluster.num_nodes
        cells = num_samples * model.num_layers * (model.num_experts + (len(self._known) + len(new)) * places)
        if cells > MAX_CELLS:
            raise UsageError(
                f"{num_samples:,} samples x {model.num_layers} layers x {model.num_experts} experts and {places} places"
                f" are {cells:,} counts; expected at most {MAX_CELLS:,}: plan by a part of the trace"
            )
        for name in (name for name, placement in new.items() if placement.has_replicas):
            if (rule := new[name].replica_rule) is not ReplicaRule.EVEN:
                raise UsageError(
                    f"the {name} placement has replicas and the rule {rule}, so that traffic depends on where samples"
                    " are; expected no replicas, or the rule even (--strategy eplb)"
                )
            if isinstance(self.trace, CountTrace):
                obstacle = f"the {name} placement has replicas"
                if model.num_experts % devices:
                    obstacle = f"--cluster {self.cluster}: {devices} devices do not divide {model.num_experts} experts"
                raise UsageError(
                    f"{obstacle}, and counts do not say which replica serves a token; expected devices that divide the"
                    " experts, each expert once, or a trace of tokens"
                )


# Counts the pairs of samples with experts, `[I, L, E]`, and their traffic under each of several placements.
Counter = Callable[[SampleCounts, Sequence[Placement]], tuple[NDArray[np.int32], list[SampleTraffic]]]


def walk_samples(
    samples: SampleCounts, placements: Sequence[Placement]
) -> tuple[NDArray[np.int32], list[SampleTraffic]]:
    """Count as `Counter` says, by a walk of all tokens, or of all counts."""
    trace, index, cluster, model = samples.trace, samples.index, samples.cluster, samples.trace.meta.model
    shape = (len(index.sample), model.num_layers, model.num_experts)
    experts_ILE = np.zeros(shape, np.int32)
    traffics = [SampleTraffic.empty(one, shape[0], cluster, linked=isinstance(trace, Trace)) for one in placements]
    if isinstance(trace, CountTrace):
        for table in trace.tables():
            np.add.at(experts_ILE, (index.rows(table), table.layer), table.counts.astype(np.int32))
        for traffic in traffics:  # every pair is a copy
            for layer in range(model.num_layers):
                traffic.copies[:, layer] = experts_ILE[:, layer] @ traffic.placement.holds(layer).astype(np.int32)
            by_node = (*shape[:2], cluster.num_nodes, cluster.devices_per_node)
            traffic.nodes[:] = traffic.copies.reshape(by_node).sum(axis=3)
        return experts_ILE, traffics
    group = cluster.devices_per_node
    tables = [[ReplicaTable.of(one, layer, group) for layer in range(model.num_layers)] for one in placements]
    for batch, place_T in index.batches(trace, samples.phases):
        assert batch.sample is not None
        turn_T = batch.sample + batch.position
        for layer, ids_TK in enumerate(batch.ids.transpose(1, 0, 2)):
            _add(experts_ILE[:, layer], place_T, ids_TK, (ids_TK < shape[2]).T)
        for traffic, of_layers in zip(traffics, tables, strict=True):
            _visit(traffic, of_layers, group, batch.ids, place_T, samples.fitted[place_T], turn_T)
    return experts_ILE, traffics


def _visit(
    traffic: SampleTraffic,
    tables: Sequence[ReplicaTable],
    group: int,
    ids_TLK: NDArray[np.uint16],
    place_T: Ints,
    fitted_T: Bools,
    turn_T: Ints,
) -> None:
    """Add the copies of a batch's tokens under one placement, and of fitted ones the experts that led to them."""
    nowhere_T = np.full(len(ids_TLK), -1)
    for layer, table in enumerate(tables):
        device_TK = table.choose(ids_TLK[:, layer], nowhere_T, turn_T)
        node_TK = np.where(device_TK < 0, -1, device_TK // group)
        visits_KT = remote_visits(device_TK, nowhere_T)
        _add(traffic.pairs[:, layer], place_T, device_TK, device_TK.T >= 0)
        _add(traffic.copies[:, layer], place_T, device_TK, visits_KT)
        _add(traffic.nodes[:, layer], place_T, node_TK, remote_visits(node_TK, nowhere_T))
        if layer and traffic.linked is not None and fitted_T.any():
            for before_T in ids_TLK[:, layer - 1].T.astype(np.int64):
                known_KT = visits_KT & fitted_T & (before_T < traffic.placement.num_experts)
                _add(traffic.linked[layer - 1], before_T, device_TK, known_KT)


def _add(to: NDArray[np.integer], row_T: Ints, column_TK: NDArray[np.integer], counted_KT: Bools) -> None:
    """Add how often each (row, column) is counted to a table."""
    width = to.shape[1]
    cells = (row_T * width + column_TK.T)[counted_KT]
    if len(cells):
        first, last = cells.min() // width, cells.max() // width
        counts = np.bincount(cells - first * width, minlength=(last - first + 1) * width)
        to[first : last + 1] += counts.reshape(-1, width).astype(to.dtype)


def sample_tally(counts: SampleCounts | None, journey: "Journey", cohort: Cohort) -> Tally:
    """Tally by step of the samples in a cohort's complete steps, which the journey moves."""
    assert counts is not None
    assert journey.moves is not None
    assert cohort.step is not None
    cluster, traffic, index = counts.cluster, counts.under(journey.placement), counts.index
    order = np.argsort(cohort.step, kind="stable")[np.count_nonzero(cohort.step < 0) :]
    place, step = cohort.unit_ids[order], cohort.step[order]
    device_LI = journey.moves[:, place]
    first_B = np.searchsorted(step, np.arange(cohort.num_steps))
    moved_B = np.add.reduceat((device_LI[1:] != device_LI[:-1]).mean(axis=0), first_B)
    tally = Tally.empty(journey, cohort, cluster, ports=True, between=True, by_step=True)
    assert tally.ports is not None
    assert tally.between is not None
    classes = [CLASSES.index(link) for link in link_classes(cluster)]
    column = {name: tally.counts[:, at] for at, name in enumerate(COUNTS)}
    column["tokens"] += np.add.reduceat(index.unit_tokens[place], first_B)
    for layer in range(tally.loads.shape[1]):
        tally.loads[:, layer] = np.add.reduceat(traffic.pairs[place, layer], first_B, dtype=np.int64)
        if tally.sent is not None and counts.experts is not None:
            np.add.at(tally.sent[:, layer], (step, device_LI[layer]), counts.experts[place, layer])
        for table, of_layer in zip(
            (tally.ports.tokens, tally.ports.contexts, tally.ports.calls),
            _attending(counts, place, step, device_LI[layer], tally.ports.tokens[:, layer].shape),
            strict=True,
        ):
            if table is not None:
                table[:, layer] = of_layer
        dispatch_BC2D, combine_BC2D = tally.ports.dispatch[:, layer], tally.ports.combined[:, layer, :, ::-1]
        exchanges = (
            (device_LI[layer], dispatch_BC2D, tally.between),
            (device_LI[layer + 1], combine_BC2D, tally.between.T),
        )
        for way, (device_I, ports_BC2D, pairs_DD) in enumerate(exchanges):
            kept_I = traffic.copies[place, layer, device_I]
            np.add.at(tally.ports.kept[:, layer, way], (step, device_I), kept_I)
            np.add.at(pairs_DD, device_I, traffic.copies[place, layer])
            ports_BC2D += sample_copies(traffic.copies[place, layer], device_I, cluster, first_B)[:, classes]
            nodes_IN = traffic.nodes[place, layer].astype(np.int64)
            own_I = nodes_IN[np.arange(len(place)), device_I // cluster.devices_per_node]
            column["node_copies"] += np.add.reduceat(nodes_IN.sum(axis=1) - own_I, first_B)
    np.fill_diagonal(tally.between, 0)
    for exchange in (tally.ports.dispatch, tally.ports.combined):
        sent_BC = exchange[:, :, :, 0].sum(axis=(1, 3))
        column["device_copies"] += sent_BC.sum(axis=1)
        if cluster.num_nodes > 1:
            column["far_copies"] += sent_BC[:, -1]
    ports = _least_ports(tally.ports, traffic.copies[place], first_B, cluster) if journey.least else tally.ports
    return replace(tally, ports=ports, moved=moved_B / np.diff([*first_B, len(place)]))


def _least_ports(ports: Ports, copies: NDArray[np.int32], first: Ints, cluster: Cluster) -> Ports:
    """The ports with the least that any homes of the samples leave to them, by the copies of each, `[I, L, D]`.

    Notes
    -----
    Steps give each device room for the same number of samples, rounded up. Whichever R of them live on the node of
    device d, which has room for so many (on d itself, where there is no other class of links), of all copies with d

        sum_i copies[i, d] - the R largest copies[i, d]                                                             (1)

    or more come from elsewhere. The first dispatch is from where samples start. What samples send is not bounded, nor
    what stays on a node of several; attention is of the mean tokens and contexts of a device.
    """
    num_nodes, group, size = cluster.num_nodes, cluster.devices_per_node, cluster.num_devices
    one_class = ports.dispatch.shape[2] == 1
    dispatch, kept = np.zeros_like(ports.dispatch), np.zeros_like(ports.kept)
    for step, copies_ILD in enumerate(np.split(copies, first[1:])):
        room = -(-len(copies_ILD) // size) * (1 if num_nodes == 1 else group)
        near_LD = np.sort(copies_ILD, axis=0)[-room:].sum(axis=0, dtype=np.int64)
        dispatch[step, :, -1, 1] = copies_ILD.sum(axis=0, dtype=np.int64) - near_LD  # (1)
        kept[step] = near_LD[:, None] if one_class else 0
    combine = dispatch[:, :, :, ::-1].copy()
    dispatch[:, 0], kept[:, 0, 0] = ports.dispatch[:, 0], ports.kept[:, 0, 0]
    mean = Ports(dispatch, combine, kept, ports.tokens, ports.contexts)
    tokens, contexts = (
        np.broadcast_to(one.mean(axis=-1, keepdims=True), one.shape) for one in (ports.tokens, ports.contexts)
    )
    return replace(mean, tokens=tokens, contexts=contexts)


def _attending(counts: SampleCounts, place: Ints, step: Ints, device: Ints, shape: tuple[int, ...]) -> list[Ints]:
    """Tokens, contexts and calls of attention on every device in every step, `[B, D]` each, of samples `[I]` there.

    Samples of one length attend in one call. Padded ones do so all together, each as long as the longest.
    """
    tokens_I, contexts_I = counts.index.unit_tokens[place], counts.index.contexts[place]
    held, tokens, contexts = np.zeros((3, *shape), np.int64)
    np.add.at(held, (step, device), 1)
    if counts.padded:
        np.maximum.at(tokens, (step, device), tokens_I)
        np.maximum.at(contexts, (step, device), contexts_I)
        return [held * tokens, held * contexts, np.minimum(held, 1)]
    np.add.at(tokens, (step, device), tokens_I)
    np.add.at(contexts, (step, device), contexts_I)
    alike = np.unique(np.stack([step * shape[1] + device, tokens_I]), axis=1)[0]
    return [tokens, contexts, np.bincount(alike, minlength=held.size).reshape(shape)]
