"""Seconds of each method of `balanced_assignment`, beside Kuhn-Munkres in the same run.

Legend: I items; N sinks, which take ceil(I / N) items each.
"""

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
from scipy.optimize import linear_sum_assignment

from moeplan.solvers.assignment import Method, balanced_assignment

from ..race import Call, race
from ..study import Row, Settings, Study

Array = np.ndarray
SPEED = ((384, 2), (768, 4), (2048, 4), (1024, 64), (256, 320))
KINDS = ("uniform", "popular", "float")
SINKS = (2, 4, 8, 16)
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
LIMITS: dict[Method, int] = {"transport": 4096, "flow": 4096, "km": 2048, "pulp": 128}
FIRST = """
import time
import numpy as np
from moeplan.solvers.assignment import balanced_assignment
costs = np.random.default_rng(0).integers(0, 10_000, (768, 4)){change}
for _ in range(2):
    started = time.process_time()
    balanced_assignment(costs, 192)
    print(time.process_time() - started)
"""


def _sizes(settings: Settings) -> list[tuple[int, int, str]]:
    return [(*size, kind) for size in SPEED[: 1 if settings.quick else None] for kind in KINDS]


def _speed(instance: tuple[int, int, str]) -> Iterator[Row]:
    num_items, num_sinks, kind = instance
    cost, room = _cost(num_items, num_sinks, kind), -(-num_items // num_sinks)
    doubled = np.repeat(cost.astype(float), room, axis=1)
    calls: dict[str, Call] = {
        "km (scipy)": lambda: linear_sum_assignment(doubled)[1] // room,
        "flow": lambda: balanced_assignment(cost, room, "flow"),
        "transport": lambda: balanced_assignment(cost, room),
    }
    timings = race(calls, "km (scipy)")
    least = _total(cost, timings["km (scipy)"].value)
    for method, timing in timings.items():
        total, name = _total(cost, timing.value), f"I={num_items} N={num_sinks} {kind}"
        yield Row(name, method, quality=total, bound=least, **timing.figures)


def _grown(settings: Settings) -> list[tuple[int, int]]:
    return list(itertools.product(SINKS[: 2 if settings.quick else None], SIZES[: 2 if settings.quick else None]))


def _growth(instance: tuple[int, int]) -> Iterator[Row]:
    num_sinks, num_items = instance
    cost, room = _cost(num_items, num_sinks, "uniform"), -(-num_items // num_sinks)
    calls: dict[str, Call] = {
        method: lambda method=method: balanced_assignment(cost, room, method)  # type: ignore[misc]
        for method, most in LIMITS.items()
        if num_items <= most
    }
    timings = race(calls, "km" if "km" in calls else "", budget_s=0.3)
    for method, timing in timings.items():
        total, name = _total(cost, timing.value), f"I={num_items} N={num_sinks}"
        axis = f"items I, N = {num_sinks}"
        yield Row(name, method, quality=total, axis=axis, size=num_items, **timing.figures)


def _first_calls(costs: str) -> Iterator[Row]:
    """The first call of a process whose cache is empty, of one that finds it filled, and the second call of that."""
    code = FIRST.format(change=" / 9_999" if costs == "floats" else "")
    with tempfile.TemporaryDirectory() as cache:
        empty, filled = (_in_process(code, cache) for _ in range(2))
    for method, seconds in (("nothing cached", empty[0]), ("cached on disk", filled[0]), ("later calls", filled[1])):
        yield Row(f"I=768 N=4 {costs}", method, seconds=seconds, least_s=seconds)


def _in_process(code: str, cache: str) -> list[float]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return [float(line) for line in done.stdout.split()]


def _cost(num_items: int, num_sinks: int, kind: str) -> Array:
    rng = np.random.default_rng(0)
    uniform = rng.integers(0, 10_000, (num_items, num_sinks))
    if kind == "popular":
        return uniform - rng.integers(0, 5_000, num_sinks)
    return uniform / 9_999 if kind == "float" else uniform


def _total(cost: Array, sink: Array) -> float:
    return float(cost[np.arange(len(cost)), sink].sum())


STUDIES = (
    Study(
        title="Beside Kuhn-Munkres on duplicated columns",
        quality="total cost",
        baseline="km (scipy)",
        note="The total cost that each method finds, and how much faster than SciPy's Kuhn-Munkres it is. "
        "km (scipy) is `linear_sum_assignment` alone on a matrix duplicated beforehand, whose memory is not in MB;"
        " flow and transport are whole calls, checks and conversions included. Costs: integers to 9,999; the same less"
        " a popularity of each sink; floats. The bound is km's optimum.",
        instances=_sizes,
        rows=_speed,
    ),
    Study(
        title="First calls: compiling and loading",
        quality="none",
        note="Seconds of each method's first call, compiling or loading included. "
        "Each in a process of its own, imports not counted; in no other figure.",
        instances=lambda settings: ["integers"] if settings.quick else ["integers", "floats"],
        rows=_first_calls,
    ),
    Study(
        title="Growth with items and sinks",
        quality="total cost",
        baseline="km",
        note="The same figures as items and sinks grow. "
        "Whole calls of `balanced_assignment`, integers to 9,999; pulp only up to 128 items, km up to 2,048.",
        instances=_grown,
        rows=_growth,
    ),
)
