"""The worthiest groups of a layer's experts: each brings along, per side, the as many others that are worth most to it.

A group is one device's experts of a layer; a side is a neighbouring layer, whose experts compete for the same device.
Compiled: to be imported in the call that needs it.

Legend: E experts of the layer; J = sides x E experts beside them; C experts of a group.
"""

from typing import NamedTuple

import numpy as np

from ..arrays import Bools, Floats, Ints
from ..compiled import compiled

NOTHING = -1e300


class _Room(NamedTuple):
    """Buffers of a search: sums of a group `[J]`, the largest of them `[C]`, sums of the group above `[C+1, J]`."""

    sums: Floats
    largest: Floats
    above: Floats


@compiled
def climb(worth_EJ: Floats, sides: int, group_EC: Ints) -> Floats:
    """The worth of a group that holds expert e, for each e `[E]`, and those groups, in place, improved by turns.

    The others that are worth most to a group, then the group that is worth most to those others, while that gains; what
    is good for one expert of a group is offered to all of them.
    """
    num_experts, size = group_EC.shape
    room = _room(worth_EJ, size)
    value_E, kept_EC = np.full(num_experts, NOTHING), group_EC.copy()
    score_E = np.empty(num_experts)
    for e in range(num_experts):
        group_C, value = kept_EC[e].copy(), NOTHING
        while True:
            _add(worth_EJ, group_C, room.sums)
            found = _most(room.sums, sides, room.largest)
            if found <= value:
                break
            value = found
            for member in group_C:
                if value > value_E[member]:
                    value_E[member] = value
                    group_EC[member] = group_C
            _score(worth_EJ, sides, room, score_E)
            score_E[e] = np.inf
            group_C = np.argsort(-score_E)[:size]
    return value_E


@compiled
def search(
    worth_EJ: Floats, sides: int, group_EC: Ints, value_E: Floats, most_nodes: int, stop: Bools
) -> tuple[float, int]:
    """The worthiest group of each expert, its groups and values made better in place, by branch and bound.

    Returns what may have been missed, and the nodes visited. No group is worth more than the values of its experts, or
    than what may have been missed: -1e300 if the nodes sufficed. `stop` ends it at once.
    """
    order = _by_promise(worth_EJ, sides, group_EC.shape[1])
    value, group = value_E[order], group_EC[order]
    missed, nodes = _branch(worth_EJ[order], sides, order, value, group, most_nodes, stop)
    value_E[order] = value
    group_EC[order] = group
    return missed, nodes


@compiled
def _branch(
    worth_EJ: Floats, sides: int, order: Ints, value_E: Floats, group_EC: Ints, most_nodes: int, stop: Bools
) -> tuple[float, int]:
    """Grow groups by ascending rows; end where the best completions of all sums together are worth no more than known.

    Rows, values and groups are in `order`, the members of a group are not.
    """
    num_experts, size = group_EC.shape
    rest, room = _completions(worth_EJ, size), _room(worth_EJ, size)
    row = np.zeros(size + 1, np.int64)  # the next one to try, by depth
    depth, nodes, missed, least = 0, 0, NOTHING, value_E.min()
    while depth >= 0:
        i, left = row[depth], size - depth
        if i > num_experts - left:
            depth -= 1
            continue
        if nodes >= most_nodes or stop[0]:
            room.sums[:] = room.above[depth] + rest[i, left]
            missed = max(missed, _most(room.sums, sides, room.largest))
            depth -= 1
            continue
        nodes += 1
        row[depth] = i + 1
        _descend(room.above[depth], worth_EJ[i], rest[i + 1, left - 1], room.above[depth + 1], room.sums)
        worth = _most(room.sums, sides, room.largest)
        if worth > least and left > 1:
            depth += 1
            row[depth] = i + 1
        elif worth > least:
            for next_row in row[:size]:
                if worth > value_E[next_row - 1]:
                    value_E[next_row - 1] = worth
                    group_EC[next_row - 1] = order[row[:size] - 1]
            least = value_E[row[0] - 1 :].min()
    return missed, nodes


@compiled
def met(worth_EJ: Floats, sides: int, group_EC: Ints) -> Floats:
    """Number of the E groups that join expert e with expert j beside it `[E, J]`."""
    num_beside, num_experts = worth_EJ.shape[1] // sides, len(group_EC)
    room, met_EJ = _room(worth_EJ, group_EC.shape[1]), np.zeros(worth_EJ.shape)
    for e in range(num_experts):
        _add(worth_EJ, group_EC[e], room.sums)
        for side in range(sides):
            first = side * num_beside
            chosen = np.argsort(-room.sums[first : first + num_beside])[: group_EC.shape[1]]
            for member in group_EC[e]:
                for j in chosen:
                    met_EJ[member, first + j] += 1
    return met_EJ


@compiled
def _room(worth_EJ: Floats, size: int) -> _Room:
    num_beside = worth_EJ.shape[1]
    return _Room(np.empty(num_beside), np.empty(size), np.zeros((size + 1, num_beside)))


@compiled
def _add(worth_EJ: Floats, group_C: Ints, sums_J: Floats) -> None:
    sums_J[:] = 0.0
    for member in group_C:
        for j in range(len(sums_J)):
            sums_J[j] += worth_EJ[member, j]


@compiled
def _descend(above_J: Floats, own_J: Floats, rest_J: Floats, below_J: Floats, sums_J: Floats) -> None:
    """The sums with one more expert, and with the best completion of each."""
    for j in range(len(sums_J)):
        below_J[j] = above_J[j] + own_J[j]
        sums_J[j] = below_J[j] + rest_J[j]


@compiled
def _most(sums_J: Floats, sides: int, largest_C: Floats) -> float:
    """The sum of the C largest of each side."""
    total, num_beside, last = 0.0, len(sums_J) // sides, len(largest_C) - 1
    for side in range(sides):
        largest_C[:] = NOTHING
        for j in range(side * num_beside, (side + 1) * num_beside):
            own = sums_J[j]
            if own > largest_C[last]:
                c = last
                while c > 0 and largest_C[c - 1] < own:
                    largest_C[c] = largest_C[c - 1]
                    c -= 1
                largest_C[c] = own
        total += largest_C.sum()
    return total


@compiled
def _score(worth_EJ: Floats, sides: int, room: _Room, score_E: Floats) -> None:
    """Score each expert by its worth to the others that the group with these sums brings along."""
    num_beside, size = worth_EJ.shape[1] // sides, len(room.largest)
    score_E[:] = 0.0
    for side in range(sides):
        first = side * num_beside
        for j in np.argsort(-room.sums[first : first + num_beside])[:size]:
            for e in range(len(score_E)):
                score_E[e] += worth_EJ[e, first + j]


@compiled
def _by_promise(worth_EJ: Floats, sides: int, size: int) -> Ints:
    """The experts by what each is worth at most to one device's others, the most first."""
    promise_E, largest_C = np.empty(len(worth_EJ)), np.empty(size)
    for e in range(len(worth_EJ)):
        promise_E[e] = _most(worth_EJ[e], sides, largest_C)
    return np.argsort(-promise_E)


@compiled
def _completions(row_EJ: Floats, size: int) -> Floats:
    """The most that k of the rows from i on add to each sum, `[E+1, C+1, J]` by i and k; k = 0 adds nothing."""
    num_experts, num_beside = row_EJ.shape
    rest = np.full((num_experts + 1, size + 1, num_beside), NOTHING)
    rest[:, 0] = 0.0
    largest = np.full((size, num_beside), NOTHING)
    for i in range(num_experts - 1, -1, -1):
        for j in range(num_beside):
            own, total = row_EJ[i, j], 0.0
            for k in range(size):
                if own > largest[k, j]:
                    own, largest[k, j] = largest[k, j], own
                total += largest[k, j]
                rest[i, k + 1, j] = total
    return rest
