"""A trace in count form counted again, row by row: the naive twin of `planner.measures.step_loads`.

Legend: B steps; L MoE layers; E experts; D devices.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...runtime.plan import Plan
from ...traces.count_form import CountTrace
from ...traces.reader import Trace
from .certificate import Certificate
from .recount import MOST_CELLS, Ledger, Residence
from .roster import Roster, count_rows

__all__ = ["check_tokens", "recount_counts", "steps_of", "total_of"]


def steps_of(trace: CountTrace, roster: Roster) -> NDArray[np.int64]:
    """The loads of the complete steps of a part, `[B, L, E]`."""
    shape = (roster.num_steps, trace.meta.model.num_layers, trace.meta.model.num_experts)
    if (cells := math.prod(shape)) > MOST_CELLS:
        raise UsageError(
            f"a recount of {shape[0]:,} steps needs {cells:,} loads, expected at most {MOST_CELLS:,}: certify without"
            " the trace, which checks the structure only"
        )
    loads = np.zeros(shape, np.int64)
    for unit, layer, counts_E in count_rows(trace):
        ordinal = roster.ordinal_of.get(unit, -1)
        step = ordinal if roster.step_names is not None else ordinal // roster.samples_per_step
        if ordinal >= 0 and step < roster.num_steps:
            loads[step, layer] += counts_E
    return loads


def total_of(trace: CountTrace, roster: Roster) -> NDArray[np.int64]:
    """The loads of all units of a part, `[L, E]`."""
    loads = np.zeros((trace.meta.model.num_layers, trace.meta.model.num_experts), np.int64)
    for unit, layer, counts_E in count_rows(trace):
        if unit in roster.ordinal_of:
            loads[layer] += counts_E
    return loads


def recount_counts(trace: CountTrace, roster: Roster, residences: Mapping[str, Residence]) -> dict[str, Ledger]:
    """What every residence does with the loads of a part, an expert's holders sharing alike; by the names of them."""
    loads, ledgers = steps_of(trace, roster), {}
    for label, residence in residences.items():
        device = np.zeros((*loads.shape[:2], residence.num_devices))
        for layer, held in enumerate(residence.holders):
            for expert, devices in enumerate(held):
                for one in devices:
                    device[:, layer, one] += loads[:, layer, expert] / len(devices)
        ledgers[label] = Ledger({}, device, None)
    return ledgers


def check_tokens(plan: Plan, trace: Trace | CountTrace, rosters: Sequence[Roster], certificate: Certificate) -> None:
    """Refuse other tokens than both parts of counts have; those of tokens were counted when the trace was opened."""
    assert plan.inputs.trace is not None
    if isinstance(trace, CountTrace):
        found = sum(one.num_tokens for one in rosters)
        certificate.agree("tokens of the trace", plan.inputs.trace.num_tokens, found)
