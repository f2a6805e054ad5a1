"""The condensation of one layer: which copies of a forward travel as one row, and how many rows that saves."""

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UsageError
from .chunks import Chunks
from .clusters import clusters, priority, star
from .copies import Copies, select
from .fold import Fold, asked
from .weights import in_backward


class Condenser:
    """Folds the copies that a layer sends to other devices; decisions are this rank's alone.

    Parameters
    ----------
    cosine
        Whether `reach` is a distance of directions and rows are kept as LUFFY keeps them. Else it is the error that a
        copy may add: the sum of its experts' gate weights times gains, times the distance.
    gain_E
        Gains of experts, float32 `[E]`; None: 1.

    Attributes
    ----------
    reach
        How far a copy may be from the one that stands for it; None or 0: nothing is condensed.
    in_eval
        Whether copies are condensed outside training, too.
    rows, saved
        Copies for other devices in forwards in training mode since the last reset, and how many of them did not travel.
    """

    def __init__(self, *, cosine: bool, medoid: bool, gain_E: Tensor | None = None) -> None:
        self.cosine, self.medoid, self.gain_E = cosine, medoid, gain_E
        self.reach: float | None = None
        self.in_eval = False
        self.rows = self.saved = 0
        # Experts that the last forward asked, and the copies that stood for its copies; None: all travelled
        self._last: tuple[Tensor, Tensor | None] | None = None

    def fold(
        self,
        x_TM: Tensor,
        ids_TK: Tensor,
        weight_TK: Tensor,
        device_TK: Tensor,
        chunks: Chunks,
        group: dist.ProcessGroup | None,
        *,
        training: bool,
    ) -> Fold | None:
        """The rows that travel; None: all copies do. A forward that runs again folds as it did.

        Raises
        ------
        UsageError
            Another forward than the last runs again.
        """
        copies = None
        if in_backward():
            stands_n = self._known(ids_TK)
        elif self.reach and (training or self.in_eval):
            copies = select(ids_TK, device_TK, None, (1, dist.get_world_size(group)))
            stands_n = self._stands(copies, x_TM, weight_TK, dist.get_rank(group), training=training)
        else:
            stands_n = None
        self._last = ids_TK, stands_n
        if stands_n is None:
            return None
        if copies is None:
            copies = select(ids_TK, device_TK, None, (1, dist.get_world_size(group)))
        return Fold.of(copies, x_TM, weight_TK, stands_n, chunks, medoid=self.medoid)

    def _known(self, ids_TK: Tensor) -> Tensor | None:
        """The copy that stood for each in the forward that runs again; None: each for itself."""
        if self._last is not None and torch.equal(self._last[0], ids_TK):
            return self._last[1]
        if not self.reach:
            return None
        raise UsageError(
            "a checkpointed forward with condensation is run again after another forward; run backward after each"
        )

    def _stands(self, copies: Copies, x_TM: Tensor, weight_TK: Tensor, rank: int, *, training: bool) -> Tensor | None:
        """The copy that stands for each; None: each for itself."""
        assert self.reach is not None
        remote_n = copies.place != rank
        stands_n = standing(copies, x_TM, weight_TK, remote_n, self.reach, cosine=self.cosine, gain_E=self.gain_E)
        condensed = int((stands_n != torch.arange(len(stands_n), device=x_TM.device)).sum())
        if training:
            self.rows, self.saved = self.rows + int(remote_n.sum()), self.saved + condensed
        return stands_n if condensed else None


@torch.no_grad()
def standing(
    copies: Copies,
    x_TM: Tensor,
    weight_TK: Tensor,
    remote_n: Tensor,
    reach: float,
    *,
    cosine: bool,
    gain_E: Tensor | None = None,
) -> Tensor:
    """The copy that stands for each copy, int64 `[n]`, by the rule of a `Condenser`; those not remote stay alone."""
    ids_nK, weight_nK = asked(copies, weight_TK, torch.arange(len(remote_n), device=x_TM.device))
    gate_n1 = weight_nK.sum(1, keepdim=True)
    if cosine:
        reach_n = torch.full_like(gate_n1[:, 0], reach)
    else:
        error_nK = weight_nK if gain_E is None else weight_nK * gain_E[ids_nK.long()]
        reach_n = reach / error_nK.sum(1)
    reach_n.masked_fill_(~remote_n | (gate_n1[:, 0] <= 0), 0)
    return clusters(copies, x_TM, weight_nK / gate_n1, reach_n, star if cosine else priority)
