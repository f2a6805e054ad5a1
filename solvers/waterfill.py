"""SGLang's waterfill: the device that computes each token's shared expert, which every device holds beside its slots.

As SGLang 0.5.23 has it unless told otherwise: a rank knows where its own tokens of a step go, and nothing of others.
Let sent[d] be the pairs that rank s sends to device d in a layer and step, over K choices. A token may take any device,
with a chance in proportion to the room there; to stay is preferred.

    level   = ceil((sum_d sent[d] + floor(sum_d sent[d] / K)) / D)                                             (1)
    room[d] = max(level - sent[d], 0), of devices other than s floor(10/11 of it)                               (2)
    draw[i] = 1664525 (i xor 0x9E3779B9 s) + 1013904223  mod 2^32,  of its i-th token                           (3)

The token's device is where draw[i] mod sum room falls, the rooms in a row. Where there is no room it is s or, going up,
the first device with less than 10/11 of the best so far. A rank with fewer than 64 tokens keeps them all.

To be imported in the call that needs it: it compiles.

Legend: B steps; L MoE layers; D devices, as sources first; T tokens; K experts per token.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import Ints
from .compiled import compiled

LEAST_TOKENS = 64  # of a rank in a step; with fewer all shared experts stay
STAY, GO = 11, 10  # a load elsewhere counts 11/10 of the own
WORD = 0xFFFF_FFFF


class Waterfill:
    """The devices of shared experts, drawn token by token in their order.

    Parameters
    ----------
    sent
        Token-expert pairs of every step from each source to each device, `[B, L, D, D]`.
    tokens
        Of each source in every whole step, `[B, D]`, of which `sent` may hold a part alone.
    top_k
        K.
    """

    def __init__(self, sent: NDArray[np.integer], tokens: NDArray[Any], top_k: int) -> None:
        self._ends = np.cumsum(rooms(sent, tokens, top_k), axis=3)
        self._drawn = np.zeros((sent.shape[1], *tokens.shape), np.int64)

    def choose(self, layer: int, devices: NDArray[np.integer], home: Ints, step: Ints) -> NDArray[np.int32]:
        """The device of the shared expert of each next token `[T]`, -1 where none of its experts `[T, K]` is routed."""
        shared = np.full(len(home), -1, np.int32)
        _draw(devices.max(axis=1) >= 0, home, step, self._ends[:, layer], self._drawn[layer], shared)
        return shared


def rooms(sent: NDArray[np.integer], tokens: NDArray[Any], top_k: int) -> Ints:
    """Room of every device for the shared experts of a source, `[B, L, D, D]`, as (1) and (2) say; never 0 in all."""
    sent_BLDD: Ints = sent.astype(np.int64)
    source_D = np.arange(sent.shape[3])
    total_BLD = sent_BLDD.sum(axis=3)
    level_BLD = -(-(total_BLD + total_BLD // top_k) // len(source_D))  # (1)
    room_BLDD = np.maximum(level_BLD[..., None] - sent_BLDD, 0)
    room_BLDD = np.where(source_D[:, None] == source_D, room_BLDD, room_BLDD * GO // STAY)  # (2)
    few_BLD = np.broadcast_to((tokens < LEAST_TOKENS)[:, None], total_BLD.shape)
    only_BLD = np.where(few_BLD, source_D, _emptiest(sent_BLDD))
    alone_BLD = few_BLD | ~room_BLDD.any(axis=3)
    return np.asarray(np.where(alone_BLD[..., None], only_BLD[..., None] == source_D, room_BLDD))


def _emptiest(sent_BLDD: Ints) -> Ints:
    """The device that a source takes where there is no room, `[B, L, D]`."""
    least_BLD = np.einsum("blss->bls", sent_BLDD).copy()
    place_BLD = np.broadcast_to(np.arange(sent_BLDD.shape[3]), least_BLD.shape).copy()
    for device in range(sent_BLDD.shape[3]):
        better_BLD = STAY * sent_BLDD[..., device] < GO * least_BLD
        place_BLD[better_BLD] = device
        least_BLD = np.where(better_BLD, sent_BLDD[..., device], least_BLD)
    return place_BLD


@compiled
def _draw(
    routed: NDArray[np.bool_],
    home: Ints,
    step: Ints,
    ends: Ints,
    drawn: Ints,
    shared: NDArray[np.int32],
) -> None:
    """Write the device of every token, where rooms end at `ends` `[B, D, D]` and so many were `drawn` `[B, D]`."""
    for t in range(len(home)):
        b, s = step[t], home[t]
        i = drawn[b, s]
        drawn[b, s] += 1
        if not routed[t]:
            continue
        draw = (1664525 * ((i ^ (0x9E3779B9 * s)) & WORD) + 1013904223) & WORD  # (3)
        place, d = draw % ends[b, s, -1], 0
        while ends[b, s, d] <= place:
            d += 1
        shared[t] = d
