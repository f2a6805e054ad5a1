"""What every sample sends: to each expert, and under a placement to each device and node.

Legend: I samples of the roll; R rows, U of them different samples; T tokens; L MoE layers; E experts; K experts a
token; D devices; N nodes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ...solvers.placement import Placement, ReplicaRule
from ...solvers.ports import remote_visits
from ...solvers.replicas import ReplicaTable
from ...traces.count_form import CountTrace
from ...traces.model import ModelSpec
from ...traces.reader import Trace
from .roll import Roll

__all__ = ["Counted", "SampleTraffic", "count_samples"]

MAX_CELLS = 2**28  # of 4 bytes
MAX_PAIRS = 2**31 - 1  # of a sample in a layer
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SampleTraffic:
    """What crosses under one placement.

    Parameters
    ----------
    placement
        Its replicas, if any, are used evenly.
    copies, nodes
        Copies of each sample to every device, one a token and distinct device, and tokens that visit each node,
        int32 `[I, L, D]` and `[I, L, N]`. Where only counts are known, one a token-expert pair.
    pairs
        Token-expert pairs of each sample on every device, int32 `[I, L, D]`.
    linked
        How often a fitted token goes from an expert of layer l to a device at l + 1, int64 `[L-1, E, D]`; None where
        only counts are known.
    """

    placement: Placement
    copies: NDArray[np.int32]
    nodes: NDArray[np.int32]
    pairs: NDArray[np.int32]
    linked: Numbers | None

    @classmethod
    def empty(cls, placement: Placement, num_samples: int, cluster: Cluster, *, linked: bool) -> "SampleTraffic":
        """Of nothing yet."""
        shape = (num_samples, placement.num_layers)
        by_device = (placement.num_layers - 1, placement.num_experts, cluster.num_devices)
        copies = np.zeros((*shape, cluster.num_devices), np.int32)
        return cls(
            placement,
            copies,
            np.zeros((*shape, cluster.num_nodes), np.int32),
            np.zeros_like(copies) if linked else copies,
            np.zeros(by_device, np.int64) if linked else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """The samples of a trace, counted; `experts` are the pairs of each with every expert, int32 `[I, L, E]`."""

    experts: NDArray[np.int32]
    traffic: Mapping[str, SampleTraffic] = field(default_factory=dict)


def count_samples(
    trace: Trace | CountTrace,
    roll: Roll,
    fitted_I: NDArray[np.bool_],
    placements: Mapping[str, Placement],
    cluster: Cluster,
    *,
    phases: Collection[str] | None = None,
) -> Counted:
    """Count the samples of a trace under some placements, by their names, in one pass.

    Raises
    ------
    UsageError
        The tables would pass 2^28 cells, or replicas whose use depends on where samples are.
    """
    model = trace.meta.model
    _check(model, len(roll.sample), placements, cluster, tokens=isinstance(trace, Trace))
    traffic = {
        name: SampleTraffic.empty(placement, len(roll.sample), cluster, linked=isinstance(trace, Trace))
        for name, placement in placements.items()
    }
    counted = Counted(np.zeros((len(roll.sample), model.num_layers, model.num_experts), np.int32), traffic)
    if isinstance(trace, CountTrace):
        _add_tables(trace, roll, counted)
        _map_counts(counted, cluster)
        return counted
    visitors = [_Visitor(found, cluster) for found in traffic.values()]
    for batch in trace.batches(phases=phases):
        place_T = roll.find(batch)
        assert batch.sample is not None
        rows = _Rows.of(place_T, fitted_I[place_T], batch.sample + batch.position)
        before_TK = None
        for layer in range(model.num_layers):
            ids_TK = batch.ids[:, layer].astype(np.int64)
            counted.experts[rows.places, layer] += rows.cells(ids_TK, (ids_TK < model.num_experts).T, model.num_experts)
            for visitor in visitors:
                visitor.add(layer, ids_TK, before_TK, rows)
            before_TK = ids_TK
    return counted


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The tokens of a batch: their samples' places `[U]`, which of these each token has `[T]`, and its turn."""

    places: Numbers
    local: Numbers
    fitted: NDArray[np.bool_]
    turn: Numbers

    @classmethod
    def of(cls, place_T: Numbers, fitted_T: NDArray[np.bool_], turn_T: Numbers) -> "_Rows":
        places, local_T = np.unique(place_T, return_inverse=True)
        return cls(places, local_T, fitted_T, turn_T)

    def cells(self, column_TK: NDArray[np.integer], counted_KT: NDArray[np.bool_], width: int) -> Numbers:
        """How often each sample has each column, `[U, width]`."""
        return _cells(self.local, column_TK.T, counted_KT, len(self.places), width)


class _Visitor:
    """Sends tokens to the devices of one placement."""

    def __init__(self, traffic: SampleTraffic, cluster: Cluster) -> None:
        self.traffic, self.cluster = traffic, cluster
        placement = traffic.placement
        self.tables = [
            ReplicaTable.of(placement, layer, cluster.devices_per_node) for layer in range(placement.num_layers)
        ]

    def add(self, layer: int, ids_TK: Numbers, before_TK: Numbers | None, rows: _Rows) -> None:
        """Add a layer's copies, and what led to them from the layer before."""
        traffic, cluster = self.traffic, self.cluster
        nowhere_T = np.full(len(ids_TK), -1)
        device_TK = self.tables[layer].choose(ids_TK, nowhere_T, rows.turn)
        node_TK = np.where(device_TK < 0, -1, device_TK // cluster.devices_per_node)
        visits_KT = remote_visits(device_TK, nowhere_T)
        traffic.pairs[rows.places, layer] += rows.cells(device_TK, device_TK.T >= 0, cluster.num_devices)
        traffic.copies[rows.places, layer] += rows.cells(device_TK, visits_KT, cluster.num_devices)
        traffic.nodes[rows.places, layer] += rows.cells(node_TK, remote_visits(node_TK, nowhere_T), cluster.num_nodes)
        if before_TK is not None and traffic.linked is not None:
            num_experts = traffic.placement.num_experts
            for before_T in before_TK.T:
                known_KT = visits_KT & rows.fitted & (before_T < num_experts)
                found = _cells(before_T, device_TK.T, known_KT, num_experts, cluster.num_devices)
                traffic.linked[layer - 1] += found


def _check(
    model: ModelSpec, num_samples: int, placements: Mapping[str, Placement], cluster: Cluster, *, tokens: bool
) -> None:
    devices = cluster.num_devices
    places = 2 * devices + cluster.num_nodes
    cells = num_samples * model.num_layers * (model.num_experts + len(placements) * places)
    if cells > MAX_CELLS:
        raise UsageError(
            f"{num_samples:,} samples x {model.num_layers} layers x {model.num_experts} experts and {places} places are"
            f" {cells:,} counts; expected at most {MAX_CELLS:,}: plan by a part of the trace"
        )
    for name, placement in placements.items():
        if not placement.has_replicas:
            continue
        if placement.replica_rule is ReplicaRule.NEAREST:
            raise UsageError(
                f"the {name} placement has replicas and the rule nearest, so that traffic depends on where samples are;"
                " expected no replicas, or the rule even (--strategy eplb)"
            )
        if not tokens:
            found = f"the {name} placement has replicas"
            if model.num_experts % devices:
                found = f"--cluster {cluster}: {devices} devices do not divide {model.num_experts} experts"
            raise UsageError(
                f"{found}, and counts do not say which replica serves a token; expected devices that divide the"
                " experts, each expert once, or a trace of tokens"
            )


def _add_tables(trace: CountTrace, roll: Roll, counted: Counted) -> None:
    total_ILE = np.zeros(counted.experts.shape, np.int64)
    for table in trace.tables():
        np.add.at(total_ILE, (roll.find(table), table.layer), table.counts)
    if total_ILE.sum(axis=2, dtype=np.float64).max() > MAX_PAIRS:
        raise UsageError(f"{trace.path}: a sample with over {MAX_PAIRS:,} counts in a layer; expected single samples")
    counted.experts[:] = total_ILE


def _map_counts(counted: Counted, cluster: Cluster) -> None:
    for traffic in counted.traffic.values():
        for layer in range(traffic.placement.num_layers):
            held_ED = traffic.placement.holds(layer).astype(np.int32)
            traffic.copies[:, layer] = counted.experts[:, layer] @ held_ED
        by_node = traffic.copies.reshape(*traffic.copies.shape[:2], cluster.num_nodes, cluster.devices_per_node)
        traffic.nodes[:] = by_node.sum(axis=3)


def _cells(
    row_T: Numbers, column_KT: NDArray[np.integer], counted_KT: NDArray[np.bool_], num_rows: int, width: int
) -> Numbers:
    """How often each (row, column) is counted, `[num_rows, width]`."""
    cell_KT = row_T * width + column_KT
    return np.bincount(cell_KT[counted_KT], minlength=num_rows * width).reshape(num_rows, width)
