"""Folded copies: one row that travels for a cluster of copies, and what returns of it spread over the members.

Legend: T tokens; n copies; m rows that travel; c copies in clusters of several; r rows of these clusters; K experts per
token; M hidden size; D devices; P pieces.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from .chunks import Chunks
from .copies import Copies


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """One row in place of each cluster of copies; plain autograd, so that gradients need no code of their own."""

    copies: Copies  #: Of the rows that travel, each its own token
    x: Tensor  #: What travels, `[m, M]`
    weight: Tensor  #: Gate weights beside it, `[m, K]`
    whole: Copies  #: The copies before
    row_n: Tensor  #: The row that stands for each, int64 `[n]`
    scale: Tensor  #: The factor of its sum for each, `[n, 1]`; 1 for a copy that travels as it is

    @classmethod
    def of(
        cls, whole: Copies, x_TM: Tensor, weight_TK: Tensor, stands_n: Tensor, chunks: Chunks, *, medoid: bool
    ) -> Self:
        """Rows that stand for copies in one piece, cut into pieces of about equal size for every device.

        Parameters
        ----------
        stands_n
            The copy that stands for each, as `clusters` finds it.
        medoid
            Whether that copy travels itself; else the mean of its cluster does, weighed by the squares of gates.

        Notes
        -----
        With g_i the sum of a copy's gate weights w_i, p_i = g_i^2 / sum g^2 over its cluster, held constant:

            x = sum p_i x_i,    w = sum p_i w_i / g_i,    scale_i = g_i                                            (1)

        and for a medoid k: x = x_k, w = w_k, scale_i = g_i / g_k.
        """
        numbers_n = torch.arange(len(stands_n), device=stands_n.device)
        kept_m, place_m, counts_PD = _cut((stands_n == numbers_n).nonzero().flatten(), whole, chunks)
        numbers_m = numbers_n[: len(kept_m)]
        row_n = torch.empty_like(stands_n).index_copy_(0, kept_m, numbers_m)[stands_n]
        several_m = row_n.bincount(minlength=len(kept_m)) > 1
        member_c, several_r = several_m[row_n].nonzero().flatten(), several_m.nonzero().flatten()
        _, weight_cK = asked(whole, weight_TK, member_c)
        gate_c = weight_cK.sum(1)
        x_mM, weight_mK, beside_mK = x_TM[whole.row[kept_m]], weight_TK[whole.row[kept_m]], whole.beside[kept_m]
        if medoid:
            place_n = torch.empty_like(stands_n).index_copy_(0, member_c, numbers_n[: len(member_c)])
            kept_c = place_n[stands_n[member_c]]
            scale_c = (gate_c / gate_c[kept_c]).masked_fill(stands_n[member_c] == member_c, 1)
        else:
            scale_c, mean_c = gate_c, (several_m.cumsum(0) - 1)[row_n[member_c]]
            square_c = gate_c.detach().square()
            part_c1 = (square_c / _summed(square_c, mean_c, several_r)[mean_c])[:, None]
            x_rM = _summed(x_TM[whole.row[member_c]] * part_c1, mean_c, several_r)  # (1)
            weight_rK = _summed(weight_cK / gate_c[:, None] * part_c1, mean_c, several_r)
            x_mM = x_mM.index_copy(0, several_r, x_rM.to(x_mM.dtype))
            weight_mK = weight_mK.index_copy(0, several_r, weight_rK.to(weight_mK.dtype))
            beside_mK[several_r] = beside_mK[several_r].sort(dim=1, stable=True).values
        scale_n = scale_c.new_ones(len(stands_n)).index_copy(0, member_c, scale_c)
        copies = Copies(numbers_m, None, beside_mK, place_m, counts_PD)
        return cls(copies, x_mM, weight_mK, whole, row_n, scale_n[:, None])

    @property
    def condensed(self) -> int:
        """Copies that do not travel."""
        return len(self.row_n) - len(self.x)

    def spread(self, y_mM: Tensor, num_tokens: int) -> Tensor:
        """The sum over the copies of each token, `[T, M]`, of the partial sums of rows."""
        return self.whole.summed((y_mM[self.row_n] * self.scale).to(y_mM.dtype), num_tokens)


def asked(copies: Copies, weight_TK: Tensor, number_c: Tensor) -> tuple[Tensor, Tensor]:
    """The experts asked of the device of some copies, ascending, -1 where none, and their gate weights, `[c, K]`.

    Weights are float32 at least, and 0 where no expert is asked.
    """
    ids_cK, order_cK = copies.beside[number_c].sort(dim=1, stable=True)
    weight_cK = weight_TK[copies.row[number_c]].to(torch.promote_types(weight_TK.dtype, torch.float32))
    return ids_cK, weight_cK.gather(1, order_cK).masked_fill(ids_cK < 0, 0)


def _summed(of_c: Tensor, mean_c: Tensor, several_r: Tensor) -> Tensor:
    """Sums over the members of each cluster of several."""
    return of_c.new_zeros(len(several_r), *of_c.shape[1:]).index_add(0, mean_c, of_c)


def _cut(kept_m: Tensor, whole: Copies, chunks: Chunks) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in the order in which they travel, their places, and how many there are by piece and device, `[P, D]`."""
    num_pieces, num_devices = chunks.num_pieces, whole.counts.shape[1]
    place_m = whole.place[kept_m]
    if num_pieces > 1:
        counts = place_m.bincount(minlength=num_devices).tolist()
        place_m = place_m + num_devices * torch.cat([chunks.piece_of(count, place_m.device) for count in counts])
        place_m, order_m = place_m.sort(stable=True)
        kept_m = kept_m[order_m]
    return kept_m, place_m, place_m.bincount(minlength=num_pieces * num_devices).view(num_pieces, num_devices)
