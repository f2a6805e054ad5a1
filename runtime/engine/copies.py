"""The copies of tokens that go out to experts.

`select` sends one to each distinct device among a token's experts; `select_buffers` fills a buffer of fixed capacity
for every slot, a row an expert that a token chose.

Legend: T tokens; K experts per token; D devices; P pieces; S slots of all; C rows of a buffer; n copies; G tags;
E experts; M hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .layer_placement import Slots


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies that this rank sends, by piece, then device, then token."""

    row: Tensor  #: The token of each, int64 `[n]`; T where a buffer is padded
    #: Which of the token's experts a row is for, int64 `[n]`; None: those that are asked of the device
    choice: Tensor | None
    beside: Tensor  #: The experts asked of the device, -1 where another computes, then tags, int32 `[n, K + G]`
    place: Tensor  #: Piece times D plus device, int64 `[n]`, ascending
    counts: Tensor  #: Copies by piece and device, int64 `[P, D]`

    def hidden(self, x_TM: Tensor, rows: slice) -> Tensor:
        """Hidden vectors of some copies, `[n, M]`, zero where a buffer is padded."""
        if self.choice is None:
            return x_TM[self.row[rows]]
        return torch.cat([x_TM, x_TM.new_zeros(1, x_TM.shape[1])])[self.row[rows]]

    def weights(self, weight_TK: Tensor, rows: slice) -> Tensor:
        """Gate weights of some copies, `[n, K]` or, in buffers, `[n, 1]`."""
        if self.choice is None:
            return weight_TK[self.row[rows]]
        padded_TK = torch.cat([weight_TK, weight_TK.new_zeros(1, weight_TK.shape[1])])
        return padded_TK[self.row[rows], self.choice[rows], None]

    def summed(self, y_nM: Tensor, num_tokens: int) -> Tensor:
        """The sum over the copies of each token, `[T, M]`."""
        if self.choice is None:
            return y_nM.new_zeros(num_tokens, y_nM.shape[1]).index_add_(0, self.row, y_nM)
        return y_nM.new_zeros(num_tokens + 1, y_nM.shape[1]).index_add_(0, self.row, y_nM)[:num_tokens]

    def summed_weights(self, weight_nK: Tensor, shape: tuple[int, int]) -> Tensor:
        """The sum of rows that belong to the choices of each token, `[T, K]`."""
        if self.choice is None:
            return self.summed(weight_nK, shape[0])
        place_n = self.row * shape[1] + self.choice
        total = weight_nK.new_zeros((shape[0] + 1) * shape[1]).index_add_(0, place_n, weight_nK[:, 0])
        return total.view(-1, shape[1])[: shape[0]]


def select(
    ids_TK: Tensor, device_TK: Tensor, piece_T: Tensor | None, shape: tuple[int, int], tags_TG: Tensor | None = None
) -> Copies:
    """The copies of tokens whose experts are on these devices.

    Parameters
    ----------
    piece_T
        The piece of each token, int64 `[T]`; None: there is one.
    shape
        (P, D).
    tags_TG
        Integers below 2**31 that travel beside each token, G of them.
    """
    num_pieces, num_devices = shape
    if ids_TK.shape[1] == 1:
        device_n, row_n = device_TK[:, 0].sort(stable=True)
    else:
        wanted_TD = device_TK.new_zeros(len(ids_TK), num_devices, dtype=torch.bool).scatter_(1, device_TK, True)
        device_n, row_n = wanted_TD.T.nonzero(as_tuple=True)
    place_n = device_n
    if piece_T is not None:
        order = piece_T[row_n].argsort(stable=True)
        device_n, row_n = device_n[order], row_n[order]
        place_n = piece_T[row_n] * num_devices + device_n
    beside = ids_TK[row_n].to(torch.int32)
    if beside.shape[1] > 1:  # the only one of a token is asked of the device that its copy goes to
        beside = beside.where(device_TK[row_n] == device_n[:, None], -1)
    if tags_TG is not None:
        beside = torch.cat([beside, tags_TG[row_n].to(torch.int32)], dim=1)
    return Copies(row_n, None, beside, place_n, place_n.bincount(minlength=num_pieces * num_devices).view(shape))


def select_buffers(ids_TK: Tensor, device_TK: Tensor, piece_C: Tensor, shape: tuple[int, int], slots: Slots) -> Copies:
    """The copies of tokens in a buffer for every slot, first choices before second ones; what is beyond C is dropped.

    Parameters
    ----------
    piece_C
        The piece of each row of a buffer, ascending, int64 `[C]`.
    shape
        (P, D).
    """
    num_tokens, num_slots, capacity = len(ids_TK), len(slots.expert), len(piece_C)
    chosen_Q = slots.number[ids_TK, device_TK].T.flatten()  # of all first choices, then of all second ones
    order_Q, count_S = chosen_Q.argsort(stable=True), chosen_Q.bincount(minlength=num_slots)
    slot_Q = chosen_Q[order_Q]
    place_Q = torch.arange(len(order_Q), device=order_Q.device) - (count_S.cumsum(0) - count_S)[slot_Q]
    kept_Q = place_Q < capacity
    filled, from_Q = (slot_Q[kept_Q], place_Q[kept_Q]), order_Q[kept_Q]
    row_SC = ids_TK.new_full((num_slots, capacity), num_tokens)
    choice_SC = torch.zeros_like(row_SC)
    row_SC[filled], choice_SC[filled] = from_Q % max(num_tokens, 1), from_Q // max(num_tokens, 1)
    piece_n, order_n = piece_C.repeat(num_slots).sort(stable=True)
    row_n, slot_n = row_SC.flatten()[order_n], order_n // max(capacity, 1)
    asked_n1 = slots.expert[slot_n].where(row_n < num_tokens, -1)[:, None].to(torch.int32)
    place_n = piece_n * shape[1] + slots.device[slot_n]
    counts = place_n.bincount(minlength=shape[0] * shape[1]).view(shape)
    return Copies(row_n, choice_SC.flatten()[order_n], asked_n1, place_n, counts)
