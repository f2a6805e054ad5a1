"""The loads of experts by step, and what they make of a placement whose replicas share alike.

Legend: B steps; L MoE layers; E experts; K experts a token; D devices; R rows.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...solvers.placement import Placement, ReplicaRule
from ...traces.count_form import CountTrace
from ...traces.counts import count
from ...traces.model import ModelSpec
from ...traces.reader import Trace
from .journey import Journey
from .scene import Scene
from .splits import table_units
from .tally import Tally

__all__ = ["device_loads", "load_tally", "loads_of", "step_loads"]

MAX_CELLS = 2**28  # of 8 bytes
Numbers = NDArray[np.int64]


def step_loads(scene: Scene, *, phases: Collection[str] | None = None) -> list[Numbers]:
    """The token-expert pairs of every expert in each complete step of every cohort, `[B, L, E]`.

    Parameters
    ----------
    phases
        Instead of the scene's.

    Raises
    ------
    UsageError
        They do not fit into memory.
    """
    loads = [_nothing(cohort.num_steps, scene.source.meta.model) for cohort in scene.cohorts]
    if isinstance(scene.source, CountTrace):
        for table in scene.source.tables():
            unit_R = scene.index.rows(table)
            for cohort, loads_BLE in zip(scene.cohorts, loads, strict=True):
                rows, step_R = cohort.locate_rows(unit_R)
                np.add.at(loads_BLE, (step_R, table.layer[rows]), table.counts[rows])
        return loads
    for batch, unit_T in scene.index.batches(scene.source, phases or scene.phases or None):
        for cohort, loads_BLE in zip(scene.cohorts, loads, strict=True):
            at = cohort.locate(batch, unit_T)
            ids_TLK = batch.ids[at.rows]
            routed_TLK = (ids_TLK < loads_BLE.shape[2]) & (at.step >= 0)[:, None, None]
            token, layer, choice = np.nonzero(routed_TLK)
            np.add.at(loads_BLE, (at.step[token], layer, ids_TLK[token, layer, choice]), 1)
    return loads


def loads_of(trace: Trace | CountTrace, unit_ids: Numbers, *, phases: Collection[str] | None = None) -> Numbers:
    """The loads of these units together, those of incomplete steps too, `[L, E]`."""
    if isinstance(trace, Trace):
        return count(trace, keep=lambda units: np.isin(units, unit_ids), phases=phases).loads
    loads_LE = np.zeros((trace.meta.model.num_layers, trace.meta.model.num_experts), np.int64)
    for table in trace.tables():
        rows = np.isin(table_units(table), unit_ids)
        np.add.at(loads_LE, table.layer[rows], table.counts[rows])
    return loads_LE


def load_tally(loads: Numbers, journey: Journey) -> Tally:
    """Tally of a journey from the loads of experts alone, `[B, L, E]`.

    Raises
    ------
    UsageError
        The placement has replicas that tokens choose by where they are.
    """
    placement = journey.placement
    rule = placement.replica_rule if journey.replica_rule is None else journey.replica_rule
    if placement.has_replicas and rule != ReplicaRule.EVEN:
        raise UsageError(
            f"which replica serves a token depends on where it is ({rule}), and counts do not say;"
            " expected the rule even (--strategy eplb), no replicas, or a trace of tokens"
        )
    return Tally(np.zeros((len(loads), 0), np.int64), device_loads(loads, placement), placement.slots)


def device_loads(loads: Numbers, placement: Placement) -> NDArray[np.float64]:
    """The load of every device `[B, L, D]` for loads `[B, L, E]`, the replicas of an expert sharing alike."""
    found_BLD = np.empty((*loads.shape[:2], placement.num_devices))
    for layer in range(placement.num_layers):
        held_ED = placement.holds(layer)
        found_BLD[:, layer] = loads[:, layer] @ (held_ED / held_ED.sum(axis=1, keepdims=True))
    return found_BLD


def _nothing(num_steps: int, model: ModelSpec) -> Numbers:
    shape = (num_steps, model.num_layers, model.num_experts)
    if (cells := int(np.prod(shape, dtype=object))) > MAX_CELLS:
        raise UsageError(
            f"{shape[0]:,} steps x {shape[1]} layers x {shape[2]} experts are {cells:,} loads; expected at most"
            f" {MAX_CELLS:,}: plan by a part of the trace"
        )
    return np.zeros(shape, np.int64)
