"""Bounds of what a placement keeps together, proved again by the prices beside a plan.

Prices prove a bound by triples of layers: `solvers.bounds.triples` says what it is. Nothing is taken on trust but that
these are numbers: any prices give a bound, and so do any floors, below which no group of experts is looked for.

Legend: L MoE layers; E experts; J experts beside a layer, E a side; C experts per device; n groups begun.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError, InputError
from ...runtime.decisions import SidecarFile
from ..sidecars import parse_proof

ROUNDING = 1e-11  # of all numbers that are added
BLOCK = 1000  # groups begun that are continued at a time
MOST_GROUPS = 2e8  # looked at by all triples together
Tables = NDArray[np.float64]


def proven_shares(
    named: SidecarFile | None, tables: Tables, levels: Mapping[str, list[int]], folder: Path
) -> dict[str, float] | str:
    """By level, "device" or "node", the share of W `[L-1, E, E]` that may stay there at most; or why none is proven.

    The proof is the one `named` in the plan; `levels` hold the slots of the places of each. CertificationError where
    the file is another one than the plan names, or no proof.
    """
    if named is None:
        return "the plan names no proof"
    num_experts = tables.shape[1]
    path, shape = folder / named.file, (len(tables) + 1, num_experts, num_experts + 4)
    if not path.exists():
        return f"no {named.file} beside the plan"
    try:
        proof = parse_proof(named.read(folder), shape)
    except InputError as error:
        raise CertificationError(str(error)) from error
    shares = {}
    for level, table in proof.items():
        widths = levels.get(level, [])
        if len(set(widths)) != 1 or sum(widths) != num_experts:
            raise CertificationError(f"{path}: prices of a {level}; the plan's have replicas or unequal slots, or none")
        kept = kept_by_prices(tables, table, widths[0])
        if kept is None:
            return "too many groups of experts come close"
        shares[level] = float(np.floor(kept)) / max(float(tables.sum()), 1.0)  # transitions are whole
    return shares


def kept_by_prices(weights: Tables, table: Tables, size: int) -> float | None:
    """No placement of `size` experts per device keeps more of W `[L-1, E, E]`; None where too many groups come close.

    Parameters
    ----------
    table
        By layer and expert `[L, E, E+4]`: what the triple around this layer counts of the transitions to each expert of
        the next one, prices in the triple around this layer, the one after it and the one before it, and the floor of
        this triple.

    Notes
    -----
    Every device holds a group T of the middle layer m, and no more than the best S and U beside it:

        r(T) = max_S sum (W - share)[m-1, S, T] - before[m, S] + max_U sum share[m, T, U] - after[m, U] - own[m, T]

    Devices share out all experts, so r summed over a layer's groups, each divided among its C members, is at most

        1/C sum over t of max(floor[m], max over T that hold t of r(T)),                                        (1)

    and the prices of all experts, which every device has paid for its own, come back on top.
    """
    num_layers, num_experts = table.shape[:2]
    share = table[:-1, :, :num_experts].copy()
    share[0], share[1:][-1:] = 0, weights[1:][-1:]  # pairs that one triple alone counts
    own, before, after, floor = np.moveaxis(table[:, :, num_experts:], 2, 0)
    total, left = 0.0, int(MOST_GROUPS)
    for m in range(1, max(2, num_layers - 1)):
        sides = [(weights[m - 1] - share[m - 1]).T - before[m] / size]
        total += own[m].sum() + before[m].sum()
        if m < num_layers - 1:
            sides.append(share[m] - after[m] / size)
            total += after[m].sum()
        worth = np.stack(sides, axis=1) - (own[m] / (size * len(sides)))[:, None, None]
        best_E, left = _best(worth, size, float(floor[m, 0]), left)
        if left < 0:
            return None
        total += best_E.sum() / size  # (1)
    return float(total + ROUNDING * (weights.sum() + np.abs(table[:, :, :-1]).sum()))


def _best(worth: Tables, size: int, floor: float, left: int) -> tuple[Tables, int]:
    """The most that a group of each expert is worth, or the floor; and of so many groups to look at, how many are left.

    `worth` is `[E, sides, E]`. Groups grow by ascending rows; one is dropped where its best completions, each expert
    beside it choosing its own, do not exceed the floor.
    """
    num_experts = len(worth)
    worth = worth[np.argsort(-_top(worth, size))]
    most = np.zeros((num_experts + 1, size, *worth.shape[1:]))  # of k rows from i on
    for i in range(num_experts):
        sums = np.cumsum(-np.sort(-worth[i:], axis=0)[: size - 1], axis=0)
        most[i, 1 : len(sums) + 1] = sums
    best_E = np.full(num_experts, floor)
    begun = [(np.zeros((1, *worth.shape[1:])), np.full((1, 0), -1))]
    while begun and left >= 0:
        sums, members = begun.pop()
        lacking = size - members.shape[1]
        after = members[:, -1] if members.shape[1] else np.full(1, -1)
        options = num_experts - lacking - after
        parent = np.repeat(np.arange(len(sums)), options)
        row = np.arange(len(parent)) - np.repeat(np.cumsum(options) - options - after - 1, options)
        left -= len(parent)
        sums = sums[parent] + worth[row]
        value = _top(sums + most[row + 1, lacking - 1], size)
        kept = value > floor
        members = np.concatenate([members[parent[kept]], row[kept, None]], axis=1)
        if lacking == 1:
            np.maximum.at(best_E, members, value[kept, None])
        else:
            sums = sums[kept]
            begun += [(sums[i : i + BLOCK], members[i : i + BLOCK]) for i in range(0, len(sums), BLOCK)]
    return best_E, left


def _top(worth: Tables, size: int) -> Tables:
    """The sum of the C most of each side, `[n, sides, E]` to `[n]`."""
    first = worth.shape[2] - size
    return np.asarray(np.partition(worth, first, axis=2)[:, :, first:].sum(axis=(1, 2)))
