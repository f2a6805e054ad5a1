"""What a fixed capacity drops: the token-expert pairs that find an expert's buffer full.

Legend: T tokens; K experts a token; B steps; L MoE layers; D devices; E experts.
"""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ...traces.reader import Trace
from ...traces.split import with_units
from .survey import Cohort
from .tally import check_cells

__all__ = ["dropped_share", "sent_pairs"]


def sent_pairs(
    trace: Trace, cohorts: Sequence[Cohort], cluster: Cluster, *, phases: Collection[str] | None = None
) -> list[NDArray[np.int32]]:
    """The token-expert pairs from every device to every expert in each step of every cohort, `[B, L, D, E]`.

    Raises
    ------
    UsageError
        They do not fit into memory.
    """
    model, found = trace.model, []
    for cohort in cohorts:
        shape = (cohort.num_steps, model.num_layers, cluster.num_devices, model.num_experts)
        lengths = dict(zip(("steps", "layers", "devices", "experts"), shape, strict=True))
        check_cells("pairs under --capacity-factor", cluster, **lengths)
        found.append(np.zeros(shape, np.int32))
    for batch, unit_T in with_units(trace.batches(phases=phases)):
        for cohort, sent_BLDE in zip(cohorts, found, strict=True):
            located = cohort.locate(batch, unit_T)
            ids_TLK = batch.ids[located.rows]
            token, layer, choice = np.nonzero((ids_TLK < model.num_experts) & (located.step >= 0)[:, None, None])
            places = (located.step[token], layer, located.home[token], ids_TLK[token, layer, choice])
            np.add.at(sent_BLDE, places, 1)
    return found


def dropped_share(sent_BLDE: NDArray[np.int32], rows_BL: NDArray[np.int64]) -> float:
    """Of the routed pairs, those beyond buffers of `rows_BL` rows for an expert from each device."""
    beyond_BLDE = np.maximum(sent_BLDE - rows_BL[:, :, None, None], 0)
    return float(beyond_BLDE.sum() / sent_BLDE.sum())
