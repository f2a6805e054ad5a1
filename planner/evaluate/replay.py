"""The replay of a trace: where every token goes on each journey, tallied by unit and by step.

Tokens are walked through the layers. Samples that are re-homed are counted once for each placement, and every journey
of theirs is summed from these counts (`traffic`). Of loads alone, the loads of devices follow (`Tally.of_loads`).
`planner.certify.naive` recounts the same token by token.

Legend: T tokens; L MoE layers; K experts per token; B steps; E experts; D devices.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ...solvers.arrays import Bools, Ints
from ...solvers.cost import remote_copies
from ...solvers.ports import combined_at, port_copies, remote_visits
from ...traces.count_form import CountTrace
from .choosers import Choose, choosers, step_pairs
from .cohort import Located
from .journey import Journey
from .rebalancing import Held
from .scene import Scene
from .tally import COUNTS, Tally, check_cells
from .traffic import sample_tally

MAX_LOADS = 2**28  # of 8 bytes


class Replay(Protocol):
    """A way from journeys to tallies; two of them must agree to the last token."""

    def __call__(
        self, scene: Scene, journeys: Sequence[Journey], *, ports: bool = False, between: bool = False
    ) -> list[list[Tally]]:
        """The tally of every journey on every cohort, `[cohort][journey]`."""
        ...


class RememberingReplay:
    """A replay that tallies each journey once, so that a strategy and the evaluation of its plan walk a trace once."""

    def __init__(self, tallied: Replay) -> None:
        self._tallied = tallied
        self._known = defaultdict[tuple[Scene, bool, bool], list[tuple[Journey, tuple[Tally, ...]]]](list)

    def __call__(
        self, scene: Scene, journeys: Sequence[Journey], *, ports: bool = False, between: bool = False
    ) -> list[list[Tally]]:
        """Tally as `replay` does."""
        known, new = self._known[scene, ports, between], list[Journey]()
        for journey in sorted(journeys, key=lambda one: one.capacity_factor is None):  # a fixed capacity tallies more
            if not any(_serves(other, journey) for other in (*new, *(other for other, _ in known))):
                new.append(journey)
        known += zip(new, zip(*self._tallied(scene, new, ports=ports, between=between), strict=True), strict=True)
        rows = [next(tallies for other, tallies in known if _serves(other, journey)) for journey in journeys]
        return [list(row) for row in zip(*rows, strict=True)]


def replay(
    scene: Scene, journeys: Sequence[Journey], *, ports: bool = False, between: bool = False
) -> list[list[Tally]]:
    """The tally of every journey on every cohort, `[cohort][journey]`, in one pass over the trace.

    Of counts it is the loads alone, but for journeys whose samples are re-homed. `ports` are what seconds are predicted
    from, `between` the copies of every pair of devices.
    """
    return RememberingReplay(tallied)(scene, journeys, ports=ports, between=between)


def tallied(
    scene: Scene, journeys: Sequence[Journey], *, ports: bool = False, between: bool = False
) -> list[list[Tally]]:
    """Tally journeys that are all different as `replay` does."""
    walks = [journey for journey in journeys if journey.moves is None]
    walked = _walked(scene, walks, ports=ports, between=between) if walks else [[] for _ in scene.cohorts]
    return [
        [
            next(own).by_step(cohort) if one.moves is None else sample_tally(scene.samples, one, cohort)
            for one in journeys
        ]
        for cohort, own in zip(scene.cohorts, map(iter, walked), strict=True)
    ]


def step_loads(scene: Scene) -> list[Ints]:
    """The token-expert pairs of every expert in each complete step of every cohort, `[B, L, E]`.

    UsageError where they do not fit into memory.
    """
    return [cohort.by_step(loads_MLE) for cohort, loads_MLE in zip(scene.cohorts, _row_loads(scene), strict=True)]


def _row_loads(scene: Scene) -> list[Ints]:
    """Token-expert pairs of every expert by the rows of a tally, `[M, L, E]`."""
    model, loads = scene.source.meta.model, list[Ints]()
    for cohort in scene.cohorts:
        steps, layers, experts = cohort.num_rows, model.num_layers, model.num_experts
        check_cells("loads of experts", None, MAX_LOADS, steps=steps, layers=layers, experts=experts)
        loads.append(np.zeros((steps, layers, experts), np.int64))
    if isinstance(scene.source, CountTrace):
        for table in scene.source.tables():
            unit_R = scene.index.rows(table)
            for cohort, loads_BLE in zip(scene.cohorts, loads, strict=True):
                rows, step_R = cohort.locate_rows(unit_R)
                np.add.at(loads_BLE, (step_R, table.layer[rows]), table.counts[rows])
        return loads
    for batch, unit_T in scene.index.batches(scene.source, scene.phases or None):
        for cohort, loads_BLE in zip(scene.cohorts, loads, strict=True):
            at = cohort.locate(batch, unit_T)
            ids_TLK = batch.ids[at.rows]
            routed_TLK = (ids_TLK < loads_BLE.shape[2]) & (at.step >= 0)[:, None, None]
            token, layer, choice = np.nonzero(routed_TLK)
            np.add.at(loads_BLE, (at.step[token], layer, ids_TLK[token, layer, choice]), 1)
    return loads


def _serves(known: Journey, journey: Journey) -> bool:
    """Check whether the tally of a known journey is another's, too: chunks change no way."""
    return known.sends_as(journey) and (known.capacity_factor is not None or journey.capacity_factor is None)


def _walked(scene: Scene, journeys: Sequence[Journey], *, ports: bool, between: bool) -> list[list[Tally]]:
    """The tallies of journeys on which tokens go as the dispatch model says."""
    trace, cohorts, cluster = scene.source, scene.cohorts, scene.cluster
    if isinstance(trace, CountTrace):
        for cohort in cohorts:
            layers, devices = trace.meta.model.num_layers, cluster.num_devices
            check_cells("loads", cluster, steps=cohort.num_rows, layers=layers, devices=devices)
        pairwise = [one for one in journeys if scene.goes_by_pairs(one)]
        alone = [one for one in journeys if one not in pairwise]
        by_pairs = _of_pairs(scene, pairwise, ports=ports) if pairwise else [[] for _ in cohorts]
        rows = _row_loads(scene) if alone else [np.zeros(0, np.int64)] * len(cohorts)
        tallies = list[list[Tally]]()
        for cohort, of_pairs, loads_BLE in zip(cohorts, map(iter, by_pairs), rows, strict=True):
            tallies.append(
                [next(of_pairs) if one in pairwise else Tally.of_loads(loads_BLE, one, cohort) for one in journeys]
            )
        return tallies
    by_step = scene.samples is not None  # those that are re-homed depend on each other in a step
    walkers = [_Walker(journey, cluster) for journey in journeys]
    chosen = choosers(scene, journeys)
    tallies = [
        [
            Tally.empty(one, cohort, cluster, ports=ports, between=between, by_step=by_step, shared=int(scene.fills))
            for one in journeys
        ]
        for cohort in cohorts
    ]
    for batch, unit_T in scene.index.batches(trace, scene.phases or None):
        for cohort, row, choosing in zip(cohorts, tallies, chosen, strict=True):
            located = cohort.locate(batch, unit_T)
            ids_LTK = np.ascontiguousarray(batch.ids[located.rows].transpose(1, 0, 2))
            row_T = located.step if by_step else located.unit
            for walker, tally, (choose, _) in zip(walkers, row, choosing, strict=True):
                walker.walk(ids_LTK, located, tally, row_T, choose)
    return [
        [
            tally if held is None else tally.changing(held, cluster)
            for tally, (_, held) in zip(row, choosing, strict=True)
        ]
        for row, choosing in zip(tallies, chosen, strict=True)
    ]


def _of_pairs(scene: Scene, journeys: Sequence[Journey], *, ports: bool) -> list[list[Tally]]:
    """The tallies of journeys on counts by step and source rank; without ranks all sources count as alike."""
    cluster, top_k, tallies = scene.cluster, scene.model.top_k, list[list[Tally]]()
    ports = ports and scene.paired
    for pairs in step_pairs(scene):
        pairs_BLED = pairs[:-1]
        held = [Held.of(one, pairs_BLED, cluster.devices_per_node) for one in journeys]
        tallies.append(
            [
                Tally.of_pairs(pairs_BLED, one, of, cluster, top_k=top_k, ports=ports)
                for one, of in zip(journeys, held, strict=True)
            ]
        )
    return tallies


class _Walker:
    """Sends tokens on one journey."""

    def __init__(self, journey: Journey, cluster: Cluster) -> None:
        self.journey, self.cluster, self.group = journey, cluster, cluster.devices_per_node

    def walk(self, ids_LTK: NDArray[np.uint16], at: Located, tally: Tally, row_T: Ints, choose: Choose) -> None:
        """Add the tokens of a batch to a tally; `row_T` is the row of its counts that each adds to, -1 for none."""
        counts = {name: np.zeros(len(at.rows), dtype=np.int64) for name in COUNTS}
        counts["tokens"] += 1
        counted_T = at.step >= 0
        first, end = (at.step[counted_T].min(), at.step.max() + 1) if counted_T.any() else (0, 0)
        touched, step_T = slice(first, end), np.where(counted_T, at.step - first, -1)  # the steps of this batch
        through_ports = partial(port_copies, step=step_T, num_steps=end - first, cluster=self.cluster)
        here_T, before_T = at.home, np.full(len(at.rows), -1)
        for layer, ids_TK in enumerate(ids_LTK):
            device_TK = choose(layer, ids_TK, here_T, at)
            after_T = combined_at(self.journey.dispatch_model, here_T, device_TK)
            out_KT = self._count_copies(device_TK, here_T, counts, times=2 if after_T is here_T else 1)
            back_KT = None if after_T is here_T else self._count_copies(device_TK, after_T, counts)
            if tally.ports is not None and end > first:
                if layer < tally.ports.tokens.shape[1]:  # once where tokens are at home before every layer
                    _add_devices(tally.ports.tokens[touched, layer], step_T, here_T)
                    _add_devices(tally.ports.contexts[touched, layer], step_T, here_T, 2 * at.position + 1)
                tally.ports.dispatch[touched, layer] += through_ports(out_KT, device_TK, here_T)
                for way, end_T in enumerate((here_T,) if back_KT is None else (here_T, after_T)):
                    kept_T = np.where((end_T == device_TK.T).any(axis=0), end_T, -1)
                    _add_devices(tally.ports.kept[touched, layer, way], step_T, kept_T)
                if back_KT is not None:  # experts' devices send
                    tally.ports.combined[touched, layer, :, ::-1] += through_ports(back_KT, device_TK, after_T)
            if tally.between is not None:
                _add_pairs(out_KT & counted_T, device_TK, here_T, tally.between)
                _add_pairs((out_KT if back_KT is None else back_KT) & counted_T, device_TK, after_T, tally.between.T)
            if tally.sent is not None:
                token, choice = np.nonzero((ids_TK < tally.sent.shape[3]) & counted_T[:, None])
                np.add.at(tally.sent[:, layer], (at.step[token], here_T[token], ids_TK[token, choice]), 1)
            first_T = device_TK[:, 0]
            hop_T = (before_T >= 0) & (first_T >= 0)  # a transition between the devices of two first choices
            counts["hops"] += hop_T
            counts["hops_kept"] += hop_T & (before_T == first_T)
            counts["node_hops_kept"] += hop_T & (before_T // self.group == first_T // self.group)
            _add_devices(tally.loads[touched, layer], step_T, device_TK.T)
            before_T, here_T = first_T, after_T
        if tally.ports is not None and tally.ports.home is not None and end > first:
            home_T1 = at.home[:, None]
            tally.ports.home[touched, 0] += through_ports(remote_visits(home_T1, here_T), home_T1, here_T)
        kept = row_T >= 0
        for column, of_token_T in enumerate(counts.values()):
            tally.counts[:, column] += np.bincount(row_T[kept], of_token_T[kept], len(tally.counts)).astype(np.int64)

    def _count_copies(
        self, device_TK: NDArray[np.int32], end_T: Ints, counts: dict[str, Ints], times: int = 1
    ) -> Bools:
        """Count the copies between a token's devices and one end, where it is dispatched from or combined at."""
        visits_KT = remote_visits(device_TK, end_T)
        counts["device_copies"] += times * visits_KT.sum(axis=0)
        if self.cluster.num_nodes > 1:
            node_TK = np.where(device_TK >= 0, device_TK // self.group, -1)
            end_node_T = end_T // self.group
            counts["node_copies"] += times * remote_copies(node_TK, end_node_T)
            counts["far_copies"] += times * (visits_KT & (end_node_T != node_TK.T)).sum(axis=0)
        return visits_KT


def _add_devices(to_BD: Ints, step_T: Ints, device: NDArray[np.integer], weight_T: Ints | None = None) -> None:
    """Add tokens, or their weights, in a step to the devices they are on, `[T]` or `[K, T]`, -1 for none."""
    counted = (step_T >= 0) & (device >= 0)
    weights = None if weight_T is None else weight_T[counted]
    sums = np.bincount((step_T * to_BD.shape[1] + device)[counted], weights, to_BD.size)
    to_BD += sums.astype(np.int64).reshape(to_BD.shape)


def _add_pairs(visits_KT: Bools, device_TK: NDArray[np.int32], end_T: Ints, to_DD: Ints) -> None:
    """Add copies from each token's end to the devices it visits, `[D, D]`."""
    choice, token = np.nonzero(visits_KT)
    np.add.at(to_DD, (end_T[token], device_TK[token, choice]), 1)
