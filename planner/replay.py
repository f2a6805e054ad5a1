"""Replaying a trace under a placement: where every token goes, tallied by unit and by step.

This composes `solvers.cost` and `solvers.replicas`; `planner.certify` recounts the same with other code.

Legend: T tokens; L MoE layers; K experts a token; U units; B steps; D devices.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..profilers.cluster import Cluster
from ..runtime.plan import DispatchModel
from ..solvers.cost import remote_copies
from ..solvers.placement import Placement
from ..solvers.replicas import ReplicaTable
from ..traces.reader import Trace
from ..traces.split import with_units
from .survey import Cohort, Located

__all__ = ["COUNTS", "Route", "Tally", "replay"]

MAX_LOAD_CELLS = 2**27
COUNTS = ("tokens", "hops", "hops_kept", "node_hops_kept", "device_copies", "node_copies", "far_copies")


@dataclass(frozen=True, slots=True)
class Route:
    """A placement under a dispatch model, by the name it has in a report."""

    name: str
    dispatch_model: DispatchModel
    placement: Placement

    @property
    def label(self) -> str:
        """Its contender's label."""
        return f"{self.name}/{self.dispatch_model}"


@dataclass(frozen=True, slots=True)
class Tally:
    """What a route did with a cohort of a trace.

    Parameters
    ----------
    counts
        int64 `[U, len(COUNTS)]`: tokens, transitions of a routed first choice, those that stayed on the device and on
        the node, copies to distinct remote devices and nodes, and those to devices of other nodes, over all layers.
    loads
        Token-expert pairs of every device, int64 `[B, L, D]`.
    active
        Whether each device has slots, `[D]`.
    """

    counts: NDArray[np.int64]
    loads: NDArray[np.int64]
    active: NDArray[np.bool_]


def replay(
    trace: Trace,
    cohorts: Sequence[Cohort],
    routes: Sequence[Route],
    cluster: Cluster,
    *,
    phases: Collection[str] | None = None,
) -> list[list[Tally]]:
    """The tally of every route on every cohort, `[cohort][route]`, in one pass over the trace."""
    walkers = [_Walker(route, cluster) for route in routes]
    tallies = [[walker.empty(cohort) for walker in walkers] for cohort in cohorts]
    for batch, unit_T in with_units(trace.batches(phases=phases)):
        for cohort, row in zip(cohorts, tallies, strict=True):
            located = cohort.locate(batch, unit_T)
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

    def empty(self, cohort: Cohort) -> Tally:
        """A tally of nothing."""
        shape = (cohort.num_steps, self.placement.num_layers, self.num_devices)
        if (cells := math.prod(shape)) > MAX_LOAD_CELLS:
            raise UsageError(
                f"{shape[0]:,} steps x {shape[1]} layers x {shape[2]:,} devices are {cells:,} loads; expected at most"
                f" {MAX_LOAD_CELLS:,}: plan for fewer devices or a part of the trace"
            )
        counts = np.zeros((len(cohort.unit_ids), len(COUNTS)), np.int64)
        return Tally(counts, np.zeros(shape, np.int64), self.placement.slots > 0)

    def walk(self, ids_LTK: NDArray[np.uint16], at: Located, tally: Tally) -> None:
        """Add the tokens of a batch to a tally."""
        counts = {name: np.zeros(len(at.rows), dtype=np.int64) for name in COUNTS}
        counts["tokens"] += 1
        here_T, before_T = at.home, np.full(len(at.rows), -1)
        for layer, ids_TK in enumerate(ids_LTK):
            device_TK = self.tables[layer].choose(ids_TK, here_T, at.turn)
            after_T = _first_routed(device_TK, here_T) if self.coherent else here_T
            self._count_copies(device_TK, here_T, counts)
            self._count_copies(device_TK, after_T, counts)
            self._count_hops(before_T, device_TK[:, 0], counts)
            self._count_loads(device_TK, at.step, tally.loads, layer)
            before_T, here_T = device_TK[:, 0], after_T
        for column, of_token_T in enumerate(counts.values()):
            tally.counts[:, column] += np.bincount(at.unit, of_token_T, len(tally.counts)).astype(np.int64)

    def _count_copies(
        self, device_TK: NDArray[np.int32], end_T: NDArray[np.int64], counts: dict[str, NDArray[np.int64]]
    ) -> None:
        """The copies between a token's devices and one end, where it is dispatched from or combined at."""
        counts["device_copies"] += remote_copies(device_TK, end_T)
        if self.group == self.num_devices:
            return
        node_TK = np.where(device_TK >= 0, device_TK // self.group, -1)
        end_node_T = end_T // self.group
        counts["node_copies"] += remote_copies(node_TK, end_node_T)
        counts["far_copies"] += remote_copies(np.where(node_TK != end_node_T[:, None], device_TK, -1), end_T)

    def _count_hops(
        self, before_T: NDArray[np.int64], first_T: NDArray[np.int32], counts: dict[str, NDArray[np.int64]]
    ) -> None:
        """Transitions between the devices of two first choices, -1 where a layer has none."""
        hop_T = (before_T >= 0) & (first_T >= 0)
        counts["hops"] += hop_T
        counts["hops_kept"] += hop_T & (before_T == first_T)
        counts["node_hops_kept"] += hop_T & (before_T // self.group == first_T // self.group)

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
