"""Covers of rows by some of them: kept rows travel, and every other row has a kept one that serves it.

Legend: B blocks; n rows of a block, of which unused ones serve nobody and are served by nobody.
"""

import numpy as np

from .arrays import Bools, Ints
from .compiled import compiled, inlined


def priority_cover(serves_Bnn: Bools) -> Ints:
    """The kept row that stands for each row, `[B, n]`, its own number where it is kept.

    Rows are kept in a fixed order, those that serve most rows first, then by number, unless one kept before serves
    them; a row that is not kept goes to the first kept one that serves it.

    Parameters
    ----------
    serves_Bnn
        `[b, j, i]`: whether row j may stand for row i of block b.

    Notes
    -----
    What is kept is the lexicographically first independent set of the order, which is why
    `runtime.engine.clusters.rounds` can find the same in a few data-parallel rounds.
    """
    kept_Bn: Ints = _priority(np.ascontiguousarray(serves_Bnn))
    return kept_Bn


def star_cover(serves_Bnn: Bools) -> Ints:
    """Cover as of `priority_cover`, but each kept row serves most of the rows that are still without one (LUFFY)."""
    kept_Bn: Ints = _star(np.ascontiguousarray(serves_Bnn))
    return kept_Bn


@inlined
def _keep(serves_nn: Bools, kept_n: Ints, row: int) -> None:
    kept_n[row] = row
    for other in range(len(kept_n)):
        if serves_nn[row, other] and kept_n[other] < 0:
            kept_n[other] = row


@compiled
def _priority(serves_Bnn: Bools) -> Ints:
    num_blocks, size = serves_Bnn.shape[0], serves_Bnn.shape[1]
    kept_Bn = np.full((num_blocks, size), -1)
    rank_n, order_n, place_n = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size + 2, np.int64)
    for block in range(num_blocks):
        place_n[:] = 0  # a counting sort by falling degree
        for row in range(size):
            rank_n[row] = size - serves_Bnn[block, row].sum()
            place_n[rank_n[row] + 1] += 1
        for rank in range(size + 1):
            place_n[rank + 1] += place_n[rank]
        for row in range(size):
            order_n[place_n[rank_n[row]]] = row
            place_n[rank_n[row]] += 1
        for place in range(size):
            if kept_Bn[block, order_n[place]] < 0:
                _keep(serves_Bnn[block], kept_Bn[block], order_n[place])
    return kept_Bn


@compiled
def _star(serves_Bnn: Bools) -> Ints:
    num_blocks, size = serves_Bnn.shape[0], serves_Bnn.shape[1]
    kept_Bn = np.full((num_blocks, size), -1)
    degree_n = np.empty(size, np.int64)
    for block in range(num_blocks):
        serves_nn, kept_n = serves_Bnn[block], kept_Bn[block]
        for row in range(size):
            degree_n[row] = serves_nn[row].sum()
        for _ in range(size):
            best = -1
            for row in range(size):
                if kept_n[row] < 0 and (best < 0 or degree_n[row] > degree_n[best]):
                    best = row
            if best < 0:
                break
            kept_n[best] = best
            for row in range(size):
                if row == best or (serves_nn[best, row] and kept_n[row] < 0):
                    kept_n[row] = best
                    for other in range(size):
                        degree_n[other] -= serves_nn[other, row]
    return kept_Bn
