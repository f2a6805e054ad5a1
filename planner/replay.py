"""Replaying a trace under a placement: where every token goes, tallied by unit and by step.

This composes `solvers.cost` and `solvers.replicas`; `planner.certify` recounts the same with other code.

Legend: T tokens; L MoE layers; K experts a token; U units; B steps; D devices.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..profilers.cluster import Cluster
from ..runtime.plan import DispatchModel
from ..solvers.cost import remote_copies
from ..solvers.placement import Placement
from ..solvers.replicas import ReplicaTable
from ..traces.reader import Trace
from ..traces.split import with_units
from .survey import Located, Part

__all__ = ["COUNTS", "Route", "Tally", "replay"]

COUNTS = ("tokens", "hops", "hops_kept", "node_hops_kept", "device_copies", "node_copies")


@dataclass(frozen=True, slots=True)
class Route:
    """A placement under a dispatch model, by the name it has in a report."""

    name: str
    dispatch_model: DispatchModel
    placement: Placement


@dataclass(frozen=True, slots=True)
class Tally:
    """What a route did with a part of a trace.

    Parameters
    ----------
    counts
        int64 `[U, len(COUNTS)]`: tokens, transitions of a routed first choice, those that stayed on the device and on
        the node, copies to distinct remote devices and nodes over all layers.
    loads
        Token-expert pairs of every device, int64 `[B, L, D]`.
    """

    counts: NDArray[np.int64]
    loads: NDArray[np.int64]


def replay(
    trace: Trace,
    parts: Sequence[Part],
    routes: Sequence[Route],
    cluster: Cluster,
    *,
    phases: Collection[str] | None = None,
) -> list[list[Tally]]:
    """The tally of every route on every part, `[part][route]`, in one pass over the trace."""
    walkers = [_Walker(route, cluster) for route in routes]
    tallies = [[walker.empty(part) for walker in walkers] for part in parts]
    for batch, unit_T in with_units(trace.batches(phases=phases)):
        for part, row in zip(parts, tallies, strict=True):
            located = part.locate(batch, unit_T)
            ids_LTK = np.ascontiguousarray(batch.ids[located.rows].transpose(1, 0, 2))
            for walker, tally in zip(walkers, row, strict=True):
                walker.walk(ids_LTK, located, tally)
    return tallies


class _Walker:
    """Sends tokens along one route."""

    def __init__(self, route: Route, cluster: Cluster) -> None:
        self.coherent = route.dispatch_model == "coherent"
        self.placement = route.placement
        self.group = cluster.devices_per_node
        self.num_devices = cluster.num_devices
        self.tables = [
            ReplicaTable.of(route.placement, layer, self.group) for layer in range(route.placement.num_layers)
        ]

    def empty(self, part: Part) -> Tally:
        """A tally of nothing."""
        shape = (part.num_steps, self.placement.num_layers, self.num_devices)
        return Tally(np.zeros((len(part.unit_ids), len(COUNTS)), np.int64), np.zeros(shape, np.int64))

    def walk(self, ids_LTK: NDArray[np.uint16], at: Located, tally: Tally) -> None:
        """Add the tokens of a batch to a tally."""
        counts_TC = np.zeros((len(at.rows), len(COUNTS)), dtype=np.int64)
        counts_TC[:, 0] = 1
        here_T, before_T = at.home, None
        for layer, ids_TK in enumerate(ids_LTK):
            device_TK = self.tables[layer].choose(ids_TK, here_T, at.turn)
            first_T = _first_routed(device_TK, here_T)
            after_T = first_T if self.coherent else here_T
            self._count_copies(device_TK, here_T, after_T, counts_TC)
            routed_T = device_TK[:, 0] >= 0
            if before_T is not None:
                self._count_hops(*before_T, first_T, routed_T, counts_TC)
            before_T, here_T = (first_T, routed_T), after_T
            self._count_loads(device_TK, at.step, tally.loads, layer)
        for column in range(len(COUNTS)):
            tally.counts[:, column] += np.bincount(at.unit, counts_TC[:, column], len(tally.counts)).astype(np.int64)

    def _count_copies(
        self,
        device_TK: NDArray[np.int32],
        here_T: NDArray[np.int64],
        after_T: NDArray[np.int64],
        counts_TC: NDArray[np.int64],
    ) -> None:
        """Dispatch from `here` and combine to `after`, a copy a distinct remote device or node."""
        node_TK = np.where(device_TK >= 0, device_TK // self.group, -1)
        for column, place_TK, width in ((4, device_TK, 1), (5, node_TK, self.group)):
            dispatched_T = remote_copies(place_TK, here_T // width)
            combined_T = remote_copies(place_TK, after_T // width) if self.coherent else dispatched_T
            counts_TC[:, column] += dispatched_T + combined_T

    def _count_hops(
        self,
        before_T: NDArray[np.int64],
        was_routed_T: NDArray[np.bool_],
        first_T: NDArray[np.int64],
        routed_T: NDArray[np.bool_],
        counts_TC: NDArray[np.int64],
    ) -> None:
        hop_T = was_routed_T & routed_T
        counts_TC[:, 1] += hop_T
        counts_TC[:, 2] += hop_T & (before_T == first_T)
        counts_TC[:, 3] += hop_T & (before_T // self.group == first_T // self.group)

    def _count_loads(
        self, device_TK: NDArray[np.int32], step_T: NDArray[np.int64], loads_BLD: NDArray[np.int64], layer: int
    ) -> None:
        steps, _, devices = loads_BLD.shape
        cell_TK = step_T[:, None] * devices + device_TK
        counted_TK = (device_TK >= 0) & (step_T >= 0)[:, None]
        pairs = np.bincount(cell_TK[counted_TK], minlength=steps * devices)
        loads_BLD[:, layer] += pairs.reshape(steps, devices)


def _first_routed(device_TK: NDArray[np.int32], here_T: NDArray[np.int64]) -> NDArray[np.int64]:
    """The device of each token's highest-weight routed expert; where none is routed it stays."""
    first_T = np.argmax(device_TK >= 0, axis=1)
    device_T = device_TK[np.arange(len(device_TK)), first_T]
    return np.where(device_T >= 0, device_T, here_T).astype(np.int64)
