"""A stopwatch over the parts of a forward; it runs only inside `stopwatch`."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Literal

Part = Literal["dispatch", "experts", "combine"]
Laps = dict[Part, list[float]]  # seconds, in the order they passed

_UNTIMED = contextlib.nullcontext(enter_result=False)
_running: ContextVar[Laps | None] = ContextVar("moeplan_stopwatch", default=None)


@contextlib.contextmanager
def stopwatch() -> Iterator[Laps]:
    """Yield the seconds that this rank's dispatches, experts and combines take while the context lasts.

    A dispatch is the exchange of row counts, then for each chunk the gather of its rows, hidden vectors with ids and
    gate weights beside them, and their exchange. A combine is each chunk's exchange of partial sums, and the sum by
    token; where tokens move on, also the counts and the order of the partial sums before it. All ranks of the default
    group must time together: each lap begins with a barrier, so that nobody's waiting is counted.
    """
    laps: Laps = {"dispatch": [], "experts": [], "combine": []}
    token = _running.set(laps)
    try:
        yield laps
    finally:
        _running.reset(token)


def lap(part: Part) -> AbstractContextManager[bool]:
    """Time what is inside as a part of the forward, where a stopwatch runs: whether one does."""
    laps = _running.get()
    return _UNTIMED if laps is None else _lap(laps, part)


@contextlib.contextmanager
def _lap(laps: Laps, part: Part) -> Iterator[bool]:
    import torch.distributed as dist

    _settle()
    dist.barrier()
    start = time.perf_counter()
    yield True
    _settle()
    laps[part].append(time.perf_counter() - start)


def _settle() -> None:
    """Wait until this rank's device has computed everything."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
