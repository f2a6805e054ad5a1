"""Condensation beside samples that move: what would travel, and why the two are refused together.

A token whose row is condensed is not where its experts are. So its residual must travel by itself to the sample's new
home, and the sum that returns goes to every new home of the rows that it stands for.

Legend: T tokens; L MoE layers; n rows.
"""

from dataclasses import replace
from typing import NoReturn

import torch

from ....errors import UsageError
from ....solvers.arrays import Ints
from ....traces.embeddings import Embeddings
from ...evaluate.evaluate import evaluate
from ...evaluate.journey import Contender, Journey
from ...task import Task
from .folding import Rows, Way, as_int64
from .recorded import Recorded, recorded

WHY = "residuals of condensed rows must follow their samples, so that homes which count them stay"


def refuse_both(task: Task, journey: Journey, way: Way | None) -> NoReturn:
    """UsageError with the rows of either and of both, where hidden states tell them."""
    sent = ""
    if way is not None and (embeddings := Embeddings.beside(task.trace)) is not None:
        scene, label = task.scene, Contender("base", journey).label
        homes = evaluate(scene, [Contender("base", journey)]).homes[label][-1].device
        staying = replace(journey, dispatch_model="standard", homes=None)
        rows = travelling(recorded(scene, staying, embeddings)[-1], homes, way)
        sent = " and ".join(f"{number:,} {name}" for name, number in rows.items())
        sent = f"rows of dispatch and combine, unseen samples: {sent}; "
    raise UsageError(
        f"--condense beside the sample_policy of {task.request.on}: {sent}both never send less than the better one"
        f" ({WHY}): take one of them"
    )


def travelling(part: Recorded, homes_LI: Ints, way: Way) -> dict[str, int]:
    """Rows of dispatch and combine, all layers: as they are, condensed, with samples moving, and with both at once.

    Parameters
    ----------
    homes_LI
        Where samples are when each layer begins and after the last, `[L + 1, I]`.
    """
    counts, moving, both = part.count(way).all, 0, 0
    for layer in range(part.ids.shape[1]):
        ids_TK, weight_TK = part.ids[:, layer], part.weights[:, layer]
        x_TM = torch.from_numpy(part.embeddings.layer(layer, part.places)).float()
        now_T, next_T = (as_int64(homes_LI[at][part.unit]) for at in (layer, layer + 1))
        device_TK = part.seats.devices(layer, ids_TK)
        rows = Rows.of(ids_TK, device_TK, now_T, part.seats.step, part.seats.shape)
        row_n, device_n = rows.copies.row, rows.copies.place % part.seats.shape[0]
        away_n = device_n != next_T[row_n]
        moving += int(rows.remote_n.sum()) + int(away_n.sum())
        stands_n = way.stands(layer, rows, x_TM, weight_TK)
        kept_n = stands_n == torch.arange(len(stands_n))
        returned = torch.stack([stands_n[away_n], next_T[row_n][away_n]], dim=1)
        residual_n = ~kept_n & (device_n == device_TK[row_n, 0]) & (now_T != next_T)[row_n]
        both += int((rows.remote_n & kept_n).sum()) + len(set(map(tuple, returned.tolist()))) + int(residual_n.sum())
    sent = {"as they are": 2 * counts["rows"], "condensed": 2 * counts["sent"]}
    return sent | {"with samples moving": moving, "with both": both}
