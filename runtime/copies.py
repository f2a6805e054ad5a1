"""The copies of tokens that go out to experts: one to each distinct device among a token's experts.

Legend: T tokens; K experts a token; D devices; P pieces; n copies; G tags.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Copies", "select"]


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies that this rank sends, by piece, then device, then token.

    Parameters
    ----------
    row
        The token of each, int64 `[n]`.
    beside
        The experts asked of the device, -1 where another computes, then tags, int32 `[n, K + G]`.
    place
        Piece times D plus device, int64 `[n]`, ascending.
    counts
        Copies by piece and device, int64 `[P, D]`.
    """

    row: Tensor
    beside: Tensor
    place: Tensor
    counts: Tensor


def select(ids_TK: Tensor, device_TK: Tensor, piece_T: Tensor, shape: tuple[int, int], tags_TG: Tensor) -> Copies:
    """The copies of tokens whose experts are on these devices.

    Parameters
    ----------
    shape
        (P, D).
    tags_TG
        Integers below 2**31 that travel beside each token, G of them, perhaps none.
    """
    num_pieces, num_devices = shape
    wanted_TD = device_TK.new_zeros(len(ids_TK), num_devices, dtype=torch.bool).scatter_(1, device_TK, True)
    device_n, row_n = wanted_TD.T.nonzero(as_tuple=True)
    if num_pieces > 1:
        order = piece_T[row_n].argsort(stable=True)
        device_n, row_n = device_n[order], row_n[order]
    place_n = piece_T[row_n] * num_devices + device_n
    asked_nK = ids_TK[row_n].where(device_TK[row_n] == device_n[:, None], -1)
    beside = torch.cat([asked_nK, tags_TG[row_n]], dim=1).to(torch.int32)
    return Copies(row_n, beside, place_n, place_n.bincount(minlength=num_pieces * num_devices).view(shape))
