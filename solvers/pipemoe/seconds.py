"""The seconds of one pipelined MoE layer (PipeMoE, Eq. 9-12, with the one network channel that Eq. 11 leaves out).

A layer cut into r chunks issues r dispatches back to back, the experts take each chunk as it arrives, and r combines
follow. Forward and backward are such passes both.

Legend: r pipeline degree; t_d, t_e, t_c seconds of one chunk's dispatch, experts and combine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ..arrays import Floats, Ints

Number = TypeVar("Number", float, Floats)


def layer_seconds(
    degree: Ints, dispatch_s: Floats, experts_s: Floats, combine_s: Floats, *, full_duplex: bool = False
) -> Floats:
    """Seconds from the first dispatch to the last combine, one a degree.

    Parameters
    ----------
    degree, dispatch_s, experts_s, combine_s
        r, and the seconds of one of its r chunks: t_d, t_e, t_c.
    full_duplex
        Combines have a channel of their own. Else they queue behind all dispatches on the one channel.

    Notes
    -----
    Equal chunks in three stages take the longest stage r times and the others once; one channel for both directions
    adds that it must carry everything:

        full duplex     t = t_d + t_e + t_c + (r - 1) max(t_d, t_e, t_c)                                        (1)
        half duplex     t = max(r t_d + r t_c, (1))                                                             (2)
    """
    longest = np.maximum(np.maximum(dispatch_s, experts_s), combine_s)
    flow = dispatch_s + experts_s + combine_s + (degree - 1) * longest  # (1)
    return flow if full_duplex else np.maximum(degree * (dispatch_s + combine_s), flow)  # (2)


def chunk_seconds(dispatch_s: Floats, experts_s: Floats, combine_s: Floats, *, full_duplex: bool = False) -> Floats:
    """`layer_seconds` of chunks of any sizes, `[...]`.

    Parameters
    ----------
    dispatch_s, experts_s, combine_s
        Of each chunk, `[C, ...]`, in the order of dispatch; a chunk of no seconds at the end changes nothing.

    Notes
    -----
    `simulate`, vectorised: each chunk's stage waits for the stage before and for the chunk before.
    """
    sent = np.cumsum(dispatch_s, axis=0)
    computed, combined = np.zeros_like(sent[0]), np.zeros_like(sent[0]) if full_duplex else sent[-1]
    for sent_s, expert_s, back_s in zip(*np.broadcast_arrays(sent, experts_s, combine_s), strict=True):
        computed = np.maximum(computed, sent_s) + expert_s
        combined = np.maximum(combined, computed) + back_s
    return np.asarray(combined)


class Arms(NamedTuple, Generic[Number]):
    """t(r) = max_i (p_i + q_i r + s_i / r), convex over r > 0; arrays hold one layer an entry."""

    p1: Number
    q1: Number
    s1: Number
    p2: Number
    q2: Number
    s2: Number


def pass_arms(
    a_a: Number, b_a: Number, a_e: Number, b_e: Number, n_d: Number, n_e: Number, *, full_duplex: bool
) -> Arms[Number]:
    """`layer_seconds` under t_d = t_c = a_a + b_a n_d / r and t_e = a_e + b_e n_e / r, as a function of r alone.

    Notes
    -----
    With d = b_a n_d and e = b_e n_e, for every r >= 1,

        half duplex     t(r) = max(2 d + 2 a_a r,                          2 a_a + e + a_e r + 2 d / r)
        full duplex     t(r) = max(a_a + a_e + d + a_a r + (d + e) / r,    2 a_a + e + a_e r + 2 d / r)

    The left arm is a saturated network, the right arm saturated experts.
    """
    d, e = b_a * n_d, b_e * n_e
    left = (a_a + a_e + d, a_a, d + e) if full_duplex else (2 * d, 2 * a_a, 0 * d)
    return Arms(*left, 2 * a_a + e, a_e, 2 * d)


def turning_points(arms: Arms[float]) -> list[float]:
    """Degrees at which an arm is least or arms cross, over the reals; points that are neither do no harm."""
    p1, q1, s1, p2, q2, s2 = arms
    points = [math.sqrt(s / q) if q else math.inf for q, s in ((q1, s1), (q2, s2)) if s]
    a, b, c = q1 - q2, p1 - p2, s1 - s2  # the arms cross where a r^2 + b r + c = 0
    square = b * b - 4 * a * c
    if square >= 0:
        half = -(b + math.copysign(math.sqrt(square), b)) / 2  # no cancellation
        points += [over / under for over, under in ((half, a), (c, half)) if under]
    return points


class Stage(StrEnum):
    """Stages of a chunk, in this order."""

    DISPATCH = "dispatch"
    EXPERTS = "experts"
    COMBINE = "combine"


@dataclass(frozen=True, slots=True)
class Event:
    """One stage of one chunk, in seconds from the first dispatch."""

    stage: Stage
    chunk: int
    start_s: float
    end_s: float


def simulate(
    dispatch_s: Sequence[float], experts_s: Sequence[float], combine_s: Sequence[float], *, full_duplex: bool = False
) -> tuple[Event, ...]:
    """The events of a layer, by stage, then by chunk; the layer takes until the last one's `end_s`.

    Parameters
    ----------
    dispatch_s, experts_s, combine_s
        Seconds of each stage of each chunk, in the order of the chunks; the chunks need not be equal.
    full_duplex
        Combines have a channel of their own. Else they follow all dispatches on the one channel.

    Raises
    ------
    ValueError
        Stages of different numbers of chunks, or of none.

    Notes
    -----
    A stage of chunk i starts when the stage before it has finished chunk i and it has itself finished chunk i - 1
    (Eq. 9-11); on one channel the first combine also waits for the last dispatch, which Eq. 11 leaves out.
    """
    if not len(dispatch_s) == len(experts_s) == len(combine_s) > 0:
        lengths = len(dispatch_s), len(experts_s), len(combine_s)
        raise ValueError(f"seconds of {lengths} chunks in the three stages; expected as many in each, at least one")
    dispatches = _run(Stage.DISPATCH, dispatch_s, [0.0] * len(dispatch_s), 0.0)
    experts = _run(Stage.EXPERTS, experts_s, [event.end_s for event in dispatches], 0.0)
    free_s = 0.0 if full_duplex else dispatches[-1].end_s
    return (*dispatches, *experts, *_run(Stage.COMBINE, combine_s, [event.end_s for event in experts], free_s))


def _run(stage: Stage, durations_s: Sequence[float], ready_s: Sequence[float], free_s: float) -> list[Event]:
    """One stage of all chunks, on what is free from `free_s` on."""
    events = []
    for chunk, (duration_s, chunk_s) in enumerate(zip(durations_s, ready_s, strict=True)):
        start_s = max(free_s, chunk_s)
        free_s = start_s + duration_s
        events.append(Event(stage, chunk, start_s, free_s))
    return events
