"""The moves and swaps of samples that shorten the time of the exchanges, and of attention where that is timed.

Compiled: to be imported in the call that needs it.

Legend: I samples; D devices; S starts; C link classes; X exchanges; K ports of an exchange that are watched.
"""

import numpy as np

from ..arrays import Floats, Ints
from ..compiled import compiled, inlined
from .candidates import after, compared, fits, look
from .state import WATCHED, Held, State, exchange, placed, state_of, time_of

LEAST_GAIN = 1e-9  # relatively; less is rounding
ROUNDING = 1e-12  # relatively; of one candidate's time
MAX_SWEEPS = 8
KICKS, PAIRS = 6, 2  # of a search; a kick costs about a descent


@compiled
def shorten(rows: Floats, starts: Ints, group: int, alpha: Floats, beta: Floats, held: Held) -> tuple[float, Ints]:
    """The time of attention and exchanges, and the homes `[I]`, once samples, each in its turn, took their best move or
    swap until none gains: the best from all starts, then kicked.

    Parameters
    ----------
    rows
        Copies with every device, `[X, I+1, D]`, whose sums are exact; the last sample is none, and has none.
    starts
        Where each is, `[S, I]`, at one or several starts.
    group
        Devices a node.
    alpha, beta
        Seconds to start and a copy, `[C]`.

    Notes
    -----
    A sweep tries I (I + D) candidates. A device that changes neither the busiest port of an exchange nor the longest
    attention is passed over; most others' candidates the watched ports rule out in O(X K), and the rest take O(X) or,
    with G devices a node, O(X G). A step taken costs O(X (I K + D)).

    A kick swaps random pairs of the best homes' samples where the room allows it, and descends again. One costs about
    a start's descent. Its numbers are those of one seed: every rank draws the same.
    """
    state, drawn = state_of(rows, starts[0], group, alpha, beta, held), 1
    best, least = starts[0].copy(), np.inf
    for turn in range(len(starts) + KICKS):
        device = starts[turn].copy() if turn < len(starts) else best.copy()
        time = placed(state, device)
        if turn >= len(starts):
            time, drawn = _kicked(state, device, drawn)
        time = _descended(state, device, time)
        if time < least:
            best, least = device, time
    return least, best


@compiled
def _descended(state: State, device: Ints, time: float) -> float:
    """The time once no move and no swap gains."""
    ports, on, watch, held, none, idle = state.ports, state.on, state.watch, state.held, len(device), 0
    shape = (len(on.held), *watch.level.shape)
    shared, sign, base = np.zeros(len(on.held), np.bool_), np.zeros(shape), np.zeros(shape)
    look(state)
    for turn in range(MAX_SWEEPS * none):
        i, idle = turn % none, idle + 1
        a, best, goal, least = device[i], none, -1, time * (1 - LEAST_GAIN)
        hot, spent = on.busiest[0], on.seconds[on.busiest[0]]
        any_shared = compared(watch, a, i, hot, shared, sign, base)
        for j in range(none + len(on.held) if any_shared else 0):
            b, other = (device[j], j) if j < none else (j - none, none)
            if not shared[b] or (j >= none and on.held[b] >= held.places[b]):
                continue
            total = 0.0 if a == hot or b == hot else spent
            for x in range(shape[1]):
                busiest = 0.0
                for k in range(WATCHED):
                    seconds = base[b, x, k] - sign[b, x, k] * watch.share[other, x, k]
                    busiest = seconds if seconds > busiest else busiest
                total += busiest
            if total < least * (1 + ROUNDING) and fits(on, held, a, b, i, other):
                found = after(ports, on, held, i, other, a, b, least)
                if found < least:
                    best, goal, least = other, b, found
        if goal >= 0:
            exchange(state, device, i, best, goal)
            look(state)
            time, idle = time_of(state), 0
        elif idle == none:
            break
    return time


@compiled
def _kicked(state: State, device: Ints, drawn: int) -> tuple[float, int]:
    """The time once random pairs of samples are swapped, and the last number drawn."""
    for _ in range(PAIRS):
        i = _next(drawn)
        j = _next(i)
        drawn, i, j = j, (i >> 8) % len(device), (j >> 8) % len(device)
        if device[i] != device[j] and fits(state.on, state.held, device[i], device[j], i, j):
            exchange(state, device, i, j, device[j])
    return time_of(state), drawn


@inlined
def _next(drawn: int) -> int:
    """The next number of a linear congruential generator; its low bits repeat soon."""
    return (drawn * 1103515245 + 12345) % 2**31
