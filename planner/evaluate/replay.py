"""The replay of a trace: where every token goes on each journey, tallied by unit and by step.

Tokens are walked through the layers. Samples that are re-homed are counted once for each placement, and every journey
of theirs is summed from these counts (`traffic`). Of loads alone, the loads of devices follow (`loads`).
`planner.certify.naive` recounts the same token by token.

Legend: T tokens; L MoE layers; K experts a token; B steps; D devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ...solvers.cost import remote_copies
from ...solvers.ports import combined_at, port_copies, remote_visits
from ...solvers.replicas import ReplicaTable
from ...traces.count_form import CountTrace
from .journey import Journey
from .loads import load_tally, step_loads
from .scene import Scene
from .splits import Cohort, Located
from .tally import COUNTS, Ports, Tally, check_cells
from .traffic import sample_tally

__all__ = ["RememberingReplay", "Replay", "replay"]


class Replay(Protocol):
    """A way from journeys to tallies; two of them must agree to the last token."""

    def __call__(
        self, scene: Scene, journeys: Sequence[Journey], *, ports: bool = False, between: bool = False
    ) -> list[list[Tally]]:
        """The tally of every journey on every cohort, `[cohort][journey]`."""
        ...


def replay(
    scene: Scene, journeys: Sequence[Journey], *, ports: bool = False, between: bool = False
) -> list[list[Tally]]:
    """The tally of every journey on every cohort, `[cohort][journey]`, in one pass over the trace.

    Of counts it is the loads alone, but for journeys whose samples are re-homed.

    Parameters
    ----------
    ports, between
        Tally what seconds are predicted from, and the copies of every pair of devices, too.
    """
    walks, place = list[Journey](), list[int | None]()
    for journey in journeys:
        place.append(None if journey.moves is not None else _walk_of(journey, walks))
    walked = _walked(scene, walks, ports=ports, between=between) if walks else [[] for _ in scene.cohorts]
    return [
        [
            _rehomed(scene, journey, cohort) if at is None else row[at]
            for journey, at in zip(journeys, place, strict=True)
        ]
        for cohort, row in zip(scene.cohorts, walked, strict=True)
    ]


class RememberingReplay:
    """A replay that keeps its tallies, so that a strategy and the evaluation of its plan walk a trace once."""

    def __init__(self) -> None:
        self._known = list[tuple[Scene, Journey, tuple[bool, bool], list[Tally]]]()

    def __call__(
        self, scene: Scene, journeys: Sequence[Journey], *, ports: bool = False, between: bool = False
    ) -> list[list[Tally]]:
        """As `replay`."""
        asked = (ports, between)
        new = [journey for journey in journeys if self._tallied(scene, journey, asked) is None]
        for journey, *tallies in zip(new, *replay(scene, new, ports=ports, between=between), strict=True):
            self._known.append((scene, journey, asked, tallies))
        rows = [self._tallied(scene, journey, asked) or [] for journey in journeys]
        return [list(row) for row in zip(*rows, strict=True)]

    def _tallied(self, scene: Scene, journey: Journey, asked: tuple[bool, bool]) -> list[Tally] | None:
        """The tallies of a journey on every cohort, where they hold what is asked for."""
        for place, known, kept, tallies in self._known:
            fixed = known.capacity_factor is not None or journey.capacity_factor is None
            if place is scene and fixed and kept == asked and known.sends_as(journey):
                return tallies
        return None


def _walk_of(journey: Journey, walks: list[Journey]) -> int:
    """The number of the walk that gives a journey's tally, a new one where none does: chunks change no way."""
    for number, one in enumerate(walks):
        if one.sends_as(journey):
            if journey.capacity_factor is not None:
                walks[number] = journey  # with the pairs that it sends
            return number
    walks.append(journey)
    return len(walks) - 1


def _rehomed(scene: Scene, journey: Journey, cohort: Cohort) -> Tally:
    assert scene.samples is not None
    assert journey.moves is not None
    fixed = journey.capacity_factor is not None
    return sample_tally(scene.samples, journey.placement, cohort, journey.moves, fixed=fixed)


def _walked(scene: Scene, journeys: Sequence[Journey], *, ports: bool, between: bool) -> list[list[Tally]]:
    """The tallies of journeys on which tokens go as the dispatch model says."""
    trace, cohorts, cluster = scene.source, scene.cohorts, scene.cluster
    if isinstance(trace, CountTrace):
        for cohort in cohorts:
            layers, devices = trace.meta.model.num_layers, cluster.num_devices
            check_cells("loads", cluster, steps=cohort.num_steps, layers=layers, devices=devices)
        return [[load_tally(loads_BLE, journey) for journey in journeys] for loads_BLE in step_loads(scene)]
    walkers = [_Walker(journey, cluster) for journey in journeys]
    tallies = [
        [
            Tally.empty(
                journey.placement,
                journey.dispatch_model,
                cohort,
                cluster,
                ports=ports,
                between=between,
                fixed=journey.capacity_factor is not None,
            )
            for journey in journeys
        ]
        for cohort in cohorts
    ]
    for batch, unit_T in scene.index.batches(trace, scene.phases or None):
        for cohort, row in zip(cohorts, tallies, strict=True):
            located = cohort.locate(batch, unit_T)
            ids_LTK = np.ascontiguousarray(batch.ids[located.rows].transpose(1, 0, 2))
            for walker, tally in zip(walkers, row, strict=True):
                walker.walk(ids_LTK, located, tally)
    if scene.index.by_step:
        return [[tally.by_step(cohort) for tally in row] for cohort, row in zip(cohorts, tallies, strict=True)]
    return tallies


@dataclass(frozen=True, slots=True)
class _Window:
    """The steps that a batch touches, `first` to `last`, and its tokens' steps counted from `first`, -1 without."""

    first: int
    last: int
    step: NDArray[np.int64]

    @classmethod
    def of(cls, step_T: NDArray[np.int64]) -> "_Window":
        counted_T = step_T[step_T >= 0]
        first, last = (int(counted_T.min()), int(counted_T.max())) if len(counted_T) else (0, -1)
        return cls(first, last, np.where(step_T >= 0, step_T - first, -1))

    @property
    def num_steps(self) -> int:
        return self.last - self.first + 1

    def add(
        self, device: NDArray[np.integer], to_BD: NDArray[np.int64], weight_T: NDArray[np.int64] | None = None
    ) -> None:
        """Add tokens (or their weights) to the devices they are on, `[T]` or `[K, T]`, -1 for none."""
        devices, rows = to_BD.shape[1], to_BD[self.first : self.last + 1]
        counted = (self.step >= 0) & (device >= 0)
        weights = None if weight_T is None else weight_T[counted]
        found = np.bincount((self.step * devices + device)[counted], weights, self.num_steps * devices)
        rows += found.astype(np.int64).reshape(rows.shape)


class _Walker:
    """Sends tokens on one journey."""

    def __init__(self, journey: Journey, cluster: Cluster) -> None:
        self.dispatch_model, self.cluster, self.group = journey.dispatch_model, cluster, cluster.devices_per_node
        self.tables = [
            ReplicaTable.of(journey.placement, layer, self.group, journey.replica_rule)
            for layer in range(journey.placement.num_layers)
        ]

    def walk(self, ids_LTK: NDArray[np.uint16], at: Located, tally: Tally) -> None:
        """Add the tokens of a batch to a tally."""
        counts = {name: np.zeros(len(at.rows), dtype=np.int64) for name in COUNTS}
        counts["tokens"] += 1
        window = _Window.of(at.step)
        here_T, before_T = at.home, np.full(len(at.rows), -1)
        for layer, ids_TK in enumerate(ids_LTK):
            device_TK = self.tables[layer].choose(ids_TK, here_T, at.turn)
            after_T = combined_at(self.dispatch_model, here_T, device_TK)
            out_KT = self._count_copies(device_TK, here_T, counts, times=2 if after_T is here_T else 1)
            back_KT = None if after_T is here_T else self._count_copies(device_TK, after_T, counts)
            if tally.ports is not None and window.num_steps:
                self._count_sitting(here_T, at, window, tally.ports, layer)
                self._count_ports(out_KT, device_TK, here_T, window, tally.ports.dispatch[:, layer])
                if back_KT is not None:
                    combine_BC2D = tally.ports.combine[:, layer, :, ::-1]  # experts' devices send
                    self._count_ports(back_KT, device_TK, after_T, window, combine_BC2D)
            if tally.between is not None:
                pairs_DD, counted_T = tally.between, window.step >= 0
                _add_pairs(out_KT & counted_T, device_TK, here_T, pairs_DD)
                _add_pairs((out_KT if back_KT is None else back_KT) & counted_T, device_TK, after_T, pairs_DD.T)
            if tally.sent is not None:
                token, choice = np.nonzero((ids_TK < tally.sent.shape[3]) & (at.step >= 0)[:, None])
                np.add.at(tally.sent[:, layer], (at.step[token], here_T[token], ids_TK[token, choice]), 1)
            self._count_hops(before_T, device_TK[:, 0], counts)
            window.add(device_TK.T, tally.loads[:, layer])
            before_T, here_T = device_TK[:, 0], after_T
        for column, of_token_T in enumerate(counts.values()):
            tally.counts[:, column] += np.bincount(at.unit, of_token_T, len(tally.counts)).astype(np.int64)

    def _count_copies(
        self,
        device_TK: NDArray[np.int32],
        end_T: NDArray[np.int64],
        counts: dict[str, NDArray[np.int64]],
        times: int = 1,
    ) -> NDArray[np.bool_]:
        """Count the copies between a token's devices and one end, where it is dispatched from or combined at."""
        visits_KT = remote_visits(device_TK, end_T)
        counts["device_copies"] += times * visits_KT.sum(axis=0)
        if self.cluster.num_nodes > 1:
            node_TK = np.where(device_TK >= 0, device_TK // self.group, -1)
            end_node_T = end_T // self.group
            counts["node_copies"] += times * remote_copies(node_TK, end_node_T)
            counts["far_copies"] += times * (visits_KT & (end_node_T != node_TK.T)).sum(axis=0)
        return visits_KT

    def _count_ports(
        self,
        visits_KT: NDArray[np.bool_],
        device_TK: NDArray[np.int32],
        end_T: NDArray[np.int64],
        window: _Window,
        to_BC2D: NDArray[np.int64],
    ) -> None:
        to_BC2D[window.first : window.last + 1] += port_copies(
            visits_KT, device_TK, end_T, window.step, num_steps=window.num_steps, cluster=self.cluster
        )

    def _count_sitting(self, here_T: NDArray[np.int64], at: Located, window: _Window, ports: Ports, layer: int) -> None:
        """Tokens and their contexts on the devices where they are before a layer; once where that never changes."""
        if layer < ports.tokens.shape[1]:
            window.add(here_T, ports.tokens[:, layer])
            window.add(here_T, ports.contexts[:, layer], 2 * at.position + 1)

    def _count_hops(
        self, before_T: NDArray[np.int64], first_T: NDArray[np.int32], counts: dict[str, NDArray[np.int64]]
    ) -> None:
        """Transitions between the devices of two first choices, -1 where a layer has none."""
        hop_T = (before_T >= 0) & (first_T >= 0)
        counts["hops"] += hop_T
        counts["hops_kept"] += hop_T & (before_T == first_T)
        counts["node_hops_kept"] += hop_T & (before_T // self.group == first_T // self.group)


def _add_pairs(
    visits_KT: NDArray[np.bool_], device_TK: NDArray[np.int32], end_T: NDArray[np.int64], to_DD: NDArray[np.int64]
) -> None:
    """Add copies from each token's end to the devices it visits, `[D, D]`."""
    choice, token = np.nonzero(visits_KT)
    np.add.at(to_DD, (end_T[token], device_TK[token, choice]), 1)
