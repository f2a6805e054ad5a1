"""Drops under a fixed capacity: the token-expert pairs that find an expert's buffer full.

Legend: T tokens; K experts a token; B steps; L MoE layers; D devices; E experts.
"""

import numpy as np
from numpy.typing import NDArray

from ...traces.count_form import of_tokens
from .scene import Scene
from .tally import check_cells

__all__ = ["dropped_share", "sent_pairs"]


def sent_pairs(scene: Scene) -> list[NDArray[np.int32]]:
    """The token-expert pairs from every device to every expert in each step of every cohort, `[B, L, D, E]`.

    Raises
    ------
    UsageError
        They do not fit into memory.
    """
    trace, cluster, tables = of_tokens(scene.source), scene.cluster, []
    for cohort in scene.cohorts:
        shape = (cohort.num_steps, trace.model.num_layers, cluster.num_devices, trace.model.num_experts)
        lengths = dict(zip(("steps", "layers", "devices", "experts"), shape, strict=True))
        check_cells("pairs under --capacity-factor", cluster, **lengths)
        tables.append(np.zeros(shape, np.int32))
    for batch, unit_T in scene.index.batches(trace, scene.phases or None):
        for cohort, sent_BLDE in zip(scene.cohorts, tables, strict=True):
            located = cohort.locate(batch, unit_T)
            ids_TLK = batch.ids[located.rows]
            token, layer, choice = np.nonzero((ids_TLK < trace.model.num_experts) & (located.step >= 0)[:, None, None])
            places = (located.step[token], layer, located.home[token], ids_TLK[token, layer, choice])
            np.add.at(sent_BLDE, places, 1)
    return tables


def dropped_share(sent_BLDE: NDArray[np.int32], rows_BL: NDArray[np.int64]) -> float:
    """Share of routed pairs dropped, with buffers of `rows_BL` rows per expert and sending device."""
    beyond_BLDE = np.maximum(sent_BLDE - rows_BL[:, :, None, None], 0)
    return float(beyond_BLDE.sum() / sent_BLDE.sum())
