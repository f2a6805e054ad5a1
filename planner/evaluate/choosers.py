"""Choosers: the device of every routed cell of a token, and of its shared expert where that is load.

A token chooses among replicas for itself, or by all counts of its step, which are read before tokens are replayed.

Legend: T tokens; K experts per token; B steps; L MoE layers; E experts; D devices; R rows of counts.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ...solvers.arrays import Floats, Ints
from ...solvers.cost import inter_ratio
from ...solvers.placement import BY_STEP
from ...solvers.replicas import ReplicaTable
from ...traces.count_form import CountTrace
from ...traces.reader import Trace
from .cohort import Cohort, Located
from .journey import Journey
from .rebalancing import Held
from .scene import Scene
from .tally import check_cells

if TYPE_CHECKING:
    from ...solvers.waterfill import Waterfill

MAX_SENT = 2**26  # cells of a few tables of 8 bytes
# The devices of a layer's routed cells, `[T, K]`, of ids `[T, K]`, where tokens are `[T]`, and their place in a cohort;
# where shared experts are load, `[T, K + 1]`, theirs last.
Choose = Callable[[int, NDArray[np.uint16], Ints, Located], NDArray[np.int32]]


def choosers(scene: Scene, journeys: Sequence[Journey]) -> list[list[tuple[Choose, Held | None]]]:
    """Choosers of replicas, `[cohort][journey]`, and the holders of experts from step to step.

    A token chooses for itself, without the latter, or by all counts of its step. Where shared experts are load, their
    devices are chosen, too.
    """
    routed = _choosers(scene, journeys)
    if not scene.fills:
        return routed
    return [
        [(_with_shared(choose, fill, cohort), held) for (choose, held), fill in zip(row, fills, strict=True)]
        for cohort, row, fills in zip(scene.cohorts, routed, _waterfills(scene, journeys), strict=True)
    ]


def _choosers(scene: Scene, journeys: Sequence[Journey]) -> list[list[tuple[Choose, Held | None]]]:
    group = scene.cluster.devices_per_node
    splits = [one.following is not None or (one.rule in BY_STEP and one.placement.has_replicas) for one in journeys]
    if any(one.dispatch_model != "standard" for one, split in zip(journeys, splits, strict=True) if split):
        raise UsageError("replicas that go by the counts of a step need tokens at home; expected standard dispatch")
    counted = step_pairs(scene) if any(splits) else [np.zeros(0, np.int32)] * len(scene.cohorts)
    alone = [None if split else _by_token(one, group) for one, split in zip(journeys, splits, strict=True)]
    return [
        [
            (choose, None) if choose else _by_step(one, cohort, pairs_BLED, scene.cluster)
            for one, choose in zip(journeys, alone, strict=True)
        ]
        for cohort, pairs_BLED in zip(scene.cohorts, counted, strict=True)
    ]


def _by_token(journey: Journey, group: int) -> Choose:
    placement, rule = journey.placement, journey.replica_rule
    tables = [ReplicaTable.of(placement, layer, group, rule) for layer in range(placement.num_layers)]
    return lambda layer, ids_TK, here_T, at: tables[layer].choose(ids_TK, here_T, at.turn)


def _by_step(journey: Journey, cohort: Cohort, pairs: NDArray[Any], cluster: Cluster) -> tuple[Choose, Held]:
    from ...solvers.step_split import StepSplit

    held = Held.of(journey, pairs[:-1], cluster.num_devices if journey.rule == "lp" else cluster.devices_per_node)
    period_B = np.append(held.period, held.period[-1:])  # the last of tokens that are in no step
    split = StepSplit(held.holders, journey.rule, pairs, round(inter_ratio(cluster)), period_B)
    step_M = _step_of_row(cohort)
    return lambda layer, ids_TK, here_T, at: split.choose(layer, ids_TK, here_T, step_M[at.step]), held


def _step_of_row(cohort: Cohort) -> Ints:
    """The step of each row of a tally, and of the row -1: the step after the last, of what is in none."""
    return np.append(cohort.step_of_row, cohort.num_steps)


def _with_shared(choose: Choose, fill: "Waterfill | None", cohort: Cohort) -> Choose:
    """A chooser that adds the device of the shared expert: where there is room, or without `fill` at home."""
    step_M = _step_of_row(cohort)

    def with_shared(layer: int, ids_TK: NDArray[np.uint16], here_T: Ints, at: Located) -> NDArray[np.int32]:
        """Devices of the routed cells, then of the shared expert, `[T, K + 1]`."""
        device_TK = choose(layer, ids_TK, here_T, at)
        if fill is None:
            shared_T = np.where(device_TK.max(axis=1) >= 0, here_T, -1).astype(np.int32)
        else:
            shared_T = fill.choose(layer, device_TK, here_T, step_M[at.step])
        return np.column_stack([device_TK, shared_T])

    return with_shared


def _waterfills(scene: Scene, journeys: Sequence[Journey]) -> "list[list[Waterfill | None]]":
    """Waterfill of shared experts, `[cohort][journey]`, None at home, by what sources send: a pass of its own."""
    from ...solvers.waterfill import Waterfill

    for one in journeys:
        if one.dispatch_model != "standard" or len({*one.placement.slots.tolist()}) > 1:
            raise UsageError(
                "--waterfill of devices with unequal slots, or of tokens that do not return home; SGLang's"
                " devices have equal ones: leave it out"
            )
    devices, layers, sent, tokens = scene.cluster.num_devices, scene.model.num_layers, [], []
    for cohort in scene.cohorts:
        shape = {"steps": cohort.num_steps + 1, "layers": layers, "sources": devices, "devices": devices}
        check_cells("pairs of steps by source and device", scene.cluster, MAX_SENT, **shape)
        sent.append([None if one.shared_at_home else np.zeros([*shape.values()], np.int32) for one in journeys])
        tokens.append(np.zeros((cohort.num_steps + 1, devices), np.int64))
    chosen = _choosers(scene, journeys)
    assert isinstance(scene.source, Trace)
    for batch, unit_T in scene.index.batches(scene.source, scene.phases or None):
        for cohort, row, sent_by, number_BD in zip(scene.cohorts, chosen, sent, tokens, strict=True):
            at = cohort.locate(batch, unit_T)
            step_T = _step_of_row(cohort)[at.step]
            np.add.at(number_BD, (step_T, at.home), 1)
            for (choose, _), sent_BLDD in zip(row, sent_by, strict=True):
                if sent_BLDD is None:
                    continue
                for layer in range(layers):
                    device_TK = choose(layer, batch.ids[at.rows, layer], at.home, at)
                    token, choice = np.nonzero(device_TK >= 0)
                    cell = step_T[token], at.home[token], device_TK[token, choice]
                    np.add.at(sent_BLDD[:, layer], cell, np.int32(1))
    return [
        [None if one is None else Waterfill(one, _whole(cohort, number_BD), scene.model.top_k) for one in row]
        for cohort, row, number_BD in zip(scene.cohorts, sent, tokens, strict=True)
    ]


def _whole(cohort: Cohort, tokens: Ints) -> Floats:
    """Tokens of each source in every whole step, `[B + 1, D]`; where they are in none, as many as in a mean step."""
    mean = tokens[:-1].sum(axis=0) * cohort.scale / cohort.num_steps
    return np.vstack([tokens[:-1] * cohort.scale, mean])


def step_pairs(scene: Scene) -> list[NDArray[Any]]:
    """Token-expert pairs by the home of their token, in each step of every cohort, then of all that are in none.

    `[B + 1, L, E, D]`, counted once. Counts without the ranks of a cluster are spread over its devices.
    """
    if not scene.counted:
        scene.counted.extend(_counted_pairs(scene))
    return scene.counted


def _counted_pairs(scene: Scene) -> list[NDArray[Any]]:
    model, devices, pairs = scene.source.meta.model, scene.cluster.num_devices, list[NDArray[Any]]()
    of_counts = isinstance(scene.source, CountTrace)
    for cohort in scene.cohorts:
        lengths = {"layers": model.num_layers, "experts": model.num_experts, "devices": devices}
        check_cells("pairs of steps", scene.cluster, steps=cohort.num_steps + 1, **lengths)
        pairs.append(np.zeros((cohort.num_steps + 1, *lengths.values()), np.int64 if of_counts else np.int32))
    if isinstance(scene.source, CountTrace):
        for table in scene.source.tables():
            unit_R = scene.index.rows(table)
            for cohort, pairs_BLED in zip(scene.cohorts, pairs, strict=True):
                rows, row_R = cohort.locate_rows(unit_R)
                step_R, layer_R = cohort.step_of_row[row_R], table.layer[rows]
                if cohort.ranked and table.source_rank is not None:
                    here = step_R, layer_R, table.source_rank[rows]
                    np.add.at(pairs_BLED.swapaxes(2, 3), here, table.counts[rows])
                else:
                    np.add.at(pairs_BLED, (step_R, layer_R), _spread(table.counts[rows], devices))
        return pairs
    for batch, unit_T in scene.index.batches(scene.source, scene.phases or None):
        for cohort, pairs_BLED in zip(scene.cohorts, pairs, strict=True):
            at = cohort.locate(batch, unit_T)
            ids_TLK, step_M = batch.ids[at.rows], _step_of_row(cohort)
            token, layer, choice = np.nonzero(ids_TLK < model.num_experts)
            cell = step_M[at.step][token], layer, ids_TLK[token, layer, choice], at.home[token]
            np.add.at(pairs_BLED, cell, np.int32(1))
    return pairs


def _spread(counts: Ints, num_devices: int) -> Ints:
    """Counts of experts `[R, E]` spread over devices `[R, E, D]`, what does not divide from another device on each."""
    turn_ED = (np.arange(num_devices) - np.arange(counts.shape[1])[:, None]) % num_devices
    return np.asarray((counts[:, :, None] + turn_ED) // num_devices)
