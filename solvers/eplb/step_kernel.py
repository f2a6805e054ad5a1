"""Refinement of one layer for its steps: random changes that lower what the steps' busiest devices hold, compiled.

To be imported in the call that needs it.

Legend: B steps; e experts; p slots on G devices; A devices that a change touches.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import Bools, Floats, Ints
from ..compiled import compiled
from ..draws import SEED, below
from .kernel import State, place, replace, state_of, swap

MARGIN = 1e-9  # less of a gain is rounding
SAMPLE = 256  # steps, by which changes are dropped early
LEAST = 8  # work of a draw
PATIENCE = 100  # changes without gain, a slot, that end it
TOP = 3  # devices remembered of each step, the busiest first: two of them may be touched


class Steps(NamedTuple):
    """The loads of steps under a state.

    Constant: `weight [e, B]`. Changing: `load [G, B]`; each step's busiest devices, `top [TOP, B]`, the maximum,
    `most [B]`. Of a change: devices and the shares of experts x and y that they gain, `at, dx, dy [G]`; which devices
    those are, `touched [G]`; the maxima it gives, `after [B]`.
    """

    weight: Floats
    load: Floats
    top: Ints
    most: Floats
    at: Ints
    dx: Floats
    dy: Floats
    touched: Bools
    after: Floats


@compiled
def refine_steps(
    weight: Floats, table: Ints, first: Ints, pinned: Bools, allowed: Bools, above: int, work: int
) -> Ints:
    """A layer better for its steps than a legal one, `[p]`; devices' experts in any order.

    Parameters
    ----------
    weight
        `[e, B]`, in random order of steps.
    table, first
        As `kernel.refine`'s, of one row.
    pinned, allowed
        Cells that stay, and cells that an expert may be in, `[G, e]`.
    above
        How many steps may be above the value that is lowered; -1: the mean is.
    work
        Loads to look at.
    """
    state = state_of(np.ones(len(weight)), first, pinned)
    place(state, table)
    steps, seed, idle = _steps_of(state, weight), np.array([SEED], np.uint64), 0
    level = _level(steps, above)
    while work > 0 and idle < PATIENCE * len(table):
        idle += 1
        work -= LEAST
        b = below(seed, len(steps.most))
        if steps.most[b] == 0 or steps.most[b] < level:
            continue
        size, i, j, x = _proposed(state, steps, allowed, b, seed)
        if size == 0:
            continue
        y = state.expert[i if j < 0 else j]
        work -= (size + 2) * min(len(steps.most), SAMPLE)
        if above < 0 and _gain(steps, x, y, size, min(len(steps.most), SAMPLE), above, level) < 0:
            continue
        work -= (size + 2) * len(steps.most)
        if _gain(steps, x, y, size, len(steps.most), above, level) > MARGIN * len(steps.most):
            work -= len(state.load) * len(steps.most)
            _apply(steps, x, y, size)
            if j < 0:
                replace(state, i, x)
            else:
                swap(state, i, j)
            level, idle = _level(steps, above), 0
    return state.expert


@compiled
def _proposed(
    state: State, steps: Steps, allowed: Bools, b: int, seed: NDArray[np.uint64]
) -> tuple[int, int, int, int]:
    """A random change that may relieve the busiest device of a step.

    How many devices it touches (0: it is not legal, or relieves nothing); the slots i and j of a swap and the expert in
    i; or the slot i, -1, and the expert that gets it.
    """
    p = steps.top[0, b]
    i = state.first[p] + below(seed, state.first[p + 1] - state.first[p])
    j, kind = below(seed, len(state.expert)), below(seed, 4)
    if kind < 2:
        return _swapped(state, steps, allowed, i, j, b), i, j, state.expert[i]
    if kind == 2:
        return _replaced(state, steps, allowed, j, state.expert[i]), j, -1, state.expert[i]
    x = below(seed, len(state.weight))
    return _replaced(state, steps, allowed, i, x), i, -1, x


@compiled
def _steps_of(state: State, weight: Floats) -> Steps:
    num_devices, num_steps = len(state.load), weight.shape[1]
    load = np.zeros((num_devices, num_steps))
    for i, d in enumerate(state.device):
        x = state.expert[i]
        load[d] += weight[x] / state.copies[x]
    steps = Steps(
        weight,
        load,
        np.zeros((TOP, num_steps), np.int64),
        np.zeros(num_steps),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices),
        np.zeros(num_devices),
        np.zeros(num_devices, np.bool_),
        np.zeros(num_steps),
    )
    _rank(steps)
    return steps


@compiled
def _rank(steps: Steps) -> None:
    """Find every step's busiest devices."""
    for b in range(len(steps.most)):
        for t in range(TOP):
            best = -1
            for d in range(len(steps.load)):
                if (t > 0 and d == steps.top[0, b]) or (t > 1 and d == steps.top[1, b]):
                    continue
                if best < 0 or steps.load[d, b] > steps.load[best, b]:
                    best = d
            steps.top[t, b] = best
        steps.most[b] = steps.load[steps.top[0, b], b]


@compiled
def _level(steps: Steps, above: int) -> float:
    """The value that is lowered: of the step that so many are above."""
    return float(np.sort(steps.most)[len(steps.most) - 1 - above]) if above >= 0 else 0.0


@compiled
def _swapped(state: State, steps: Steps, allowed: Bools, i: int, j: int, b: int) -> int:
    """The number of devices that a swap touches, 0 where it is not legal or does not relieve the first in step b."""
    p, q, x, y = state.device[i], state.device[j], state.expert[i], state.expert[j]
    if state.held[q, x] or state.held[p, y] or state.pinned[p, x] or state.pinned[q, y]:
        return 0
    if not (allowed[q, x] and allowed[p, y]):
        return 0
    less = steps.weight[x, b] / state.copies[x] - steps.weight[y, b] / state.copies[y]
    if less <= 0 or steps.load[q, b] + less >= steps.load[p, b]:
        return 0
    steps.at[0], steps.dx[0], steps.dy[0] = p, -1 / state.copies[x], 1 / state.copies[y]
    steps.at[1], steps.dx[1], steps.dy[1] = q, 1 / state.copies[x], -1 / state.copies[y]
    return 2


@compiled
def _replaced(state: State, steps: Steps, allowed: Bools, i: int, x: int) -> int:
    """The number of devices that x for a slot's expert touches, 0 where it is not legal."""
    d, y = state.device[i], state.expert[i]
    if state.copies[y] == 1 or state.pinned[d, y] or state.held[d, x] or not allowed[d, x]:
        return 0
    lighter = 1 / (state.copies[x] + 1) - 1 / state.copies[x]
    heavier = 1 / (state.copies[y] - 1) - 1 / state.copies[y]
    steps.at[0], steps.dx[0], steps.dy[0], size = d, 1 / (state.copies[x] + 1), -1 / state.copies[y], 1
    for k in range(state.copies[x]):
        q = state.at[x, k]
        steps.at[size], steps.dx[size], steps.dy[size] = q, lighter, heavier if state.held[q, y] else 0.0
        size += 1
    for k in range(state.copies[y]):
        q = state.at[y, k]
        if q != d and not state.held[q, x]:
            steps.at[size], steps.dx[size], steps.dy[size] = q, 0.0, heavier
            size += 1
    return size


@compiled
def _gain(steps: Steps, x: int, y: int, size: int, sample: int, above: int, level: float) -> float:
    """Gain of a change, summed over the first steps. With a level: 1 per step if few enough steps reach it, else -1."""
    after, touched = steps.after, steps.touched
    touched[steps.at[:size]] = True
    for b in range(sample):
        t = 0
        while t < TOP and touched[steps.top[t, b]]:
            t += 1
        if t < TOP:
            after[b] = steps.load[steps.top[t, b], b]
        else:
            after[b] = 0.0
            for d in range(len(steps.load)):
                if not touched[d]:
                    after[b] = max(after[b], steps.load[d, b])
    touched[steps.at[:size]] = False
    for a in range(size):
        load, dx, dy = steps.load[steps.at[a]], steps.dx[a], steps.dy[a]
        for b in range(sample):
            after[b] = max(after[b], load[b] + dx * steps.weight[x, b] + dy * steps.weight[y, b])
    gain = 0.0
    if above < 0:
        for b in range(sample):
            gain += steps.most[b] - after[b]
        return gain
    reach = 0
    for b in range(sample):
        reach += after[b] >= level * (1 - MARGIN)
    return 1.0 * sample if reach <= above else -1.0


@compiled
def _apply(steps: Steps, x: int, y: int, size: int) -> None:
    """Change the loads of steps."""
    for a in range(size):
        steps.load[steps.at[a]] += steps.dx[a] * steps.weight[x] + steps.dy[a] * steps.weight[y]
    _rank(steps)
