"""The schedule of a pipelined MoE layer: when each chunk is dispatched, computed and combined."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Event", "Stage", "simulate"]


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
