"""Oracles that the PipeMoE tests share: a brute force over degrees and an event simulation that knows no formula."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[Any]
DEGREES = np.arange(1, 4001.0)


def pass_seconds(
    a_a: float, b_a: float, a_e: float, b_e: float, n_d: Array, n_e: Array, factor: float, full_duplex: bool = False
) -> Array:
    """t(r) of r = 1 .. 4000 from the seconds of its chunks, `[..., 4000]`."""
    t_d = a_a + b_a * np.asarray(n_d)[..., None] / DEGREES
    t_e = factor * (a_e + b_e * np.asarray(n_e)[..., None] / DEGREES)
    if full_duplex:
        return 2 * t_d + t_e + (DEGREES - 1) * np.maximum(t_d, t_e)
    return np.maximum(2 * DEGREES * t_d, 2 * t_d + DEGREES * t_e)


def event_simulation(
    dispatch_s: Sequence[float], experts_s: Sequence[float], combine_s: Sequence[float], full_duplex: bool
) -> float:
    """Seconds until every queue is empty: tasks start in the order of their queue once what they wait for is done."""
    chunks = range(len(dispatch_s))
    seconds = {("d", i): dispatch_s[i] for i in chunks} | {("e", i): experts_s[i] for i in chunks}
    seconds |= {("c", i): combine_s[i] for i in chunks}
    sends, returns = [("d", i) for i in chunks], [("c", i) for i in chunks]
    queues = [[("e", i) for i in chunks], *([sends, returns] if full_duplex else [sends + returns])]
    waits_for = {("e", i): ("d", i) for i in chunks} | {("c", i): ("e", i) for i in chunks}
    now = 0.0
    done: set[tuple[str, int]] = set()
    running: dict[int, tuple[float, tuple[str, int]]] = {}
    while any(queues) or running:
        for number, queue in enumerate(queues):
            if queue and number not in running and waits_for.get(queue[0]) in {None, *done}:
                task = queue.pop(0)
                running[number] = (now + seconds[task], task)
        now = min(end for end, _ in running.values())
        for number in [number for number, (end, _) in running.items() if end == now]:
            done.add(running.pop(number)[1])
    return now


@pytest.fixture(scope="session")
def brute_force() -> Callable[..., Array]:
    return pass_seconds


@pytest.fixture(scope="session")
def simulated() -> Callable[[Sequence[float], Sequence[float], Sequence[float], bool], float]:
    return event_simulation
