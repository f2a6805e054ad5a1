"""How seconds, what is kept and memory grow with layers L, experts E and devices D."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moeplan.planner.figures import percent

from ...race import race
from ...routing import markov
from ...study import Row, Settings, Study
from .trail import Trail, annealed, chained, held_bytes, swept

NEARLY = 0.99  # of what the whole budget keeps
BUDGET_S, QUICK_S = 10.0, 0.5
MEMORY_SHARE = 0.25  # of the budget
LAYERS, EXPERTS = "layers L (E = 64, D = 16)", "experts E (L = 6, D = 8)"
MANY, ONE = "devices D (L = 6, E = 1,024)", "devices D, one expert each (L = 6, E = D)"
DEEP = "layers L (E = 256, D = 64)"


@dataclass(frozen=True, slots=True)
class _Size:
    """A point of a curve."""

    axis: str
    size: int
    shape: tuple[int, int, int]
    budget_s: float

    @property
    def name(self) -> str:
        return "L={} E={} D={}".format(*self.shape)


def _sizes(settings: Settings) -> list[_Size]:
    found = [
        *((LAYERS, layers, (layers, 64, 16)) for layers in (3, 6, 12, 24, 58)),
        *((EXPERTS, experts, (6, experts, 8)) for experts in (16, 32, 64, 128, 256)),
        *((ONE, devices, (6, devices, devices)) for devices in (8, 32, 128, 512, 1024)),
    ]
    if settings.quick:
        return [_Size(*one, QUICK_S) for one in found[::5]]
    found += [(MANY, devices, (6, 1024, devices)) for devices in (8, 32, 128, 512)]
    if settings.full:
        found += [(DEEP, layers, (layers, 256, 64)) for layers in (6, 15, 29, 58)]
    return [_Size(*one, BUDGET_S) for one in found]


def _rows(size: _Size) -> Iterator[Row]:
    num_layers, num_experts, devices = size.shape
    weights = markov(np.random.default_rng(0), num_layers, num_experts)
    start = race({"chain": lambda: chained(weights, devices)}, budget_s=0.1)["chain"]
    kept = float(weights[start.value].sum() / weights.sum())
    sweeps, annealing = swept(weights, devices), annealed(weights, devices, size.budget_s)
    figures = {**start.figures, "ratio": sweeps.seconds / start.seconds, "axis": size.axis, "size": size.size}
    yield Row(size.name, "chain", quality=kept, bound=sweeps.bound, **figures)
    held = held_bytes(weights, devices, size.budget_s * MEMORY_SHARE)
    points = [("sweeps", sweeps, sweeps.seconds, held["sweeps"])]
    for method, seconds in reached(annealing, sweeps.kept).items():
        points.append((method, annealing, seconds, held["annealing"]))
    for method, trail, seconds, memory_bytes in points:
        known = {"memory_bytes": memory_bytes, "axis": size.axis, "size": size.size}
        more = {"in all, s": trail.seconds}
        yield trail.row(
            size.name, method, baseline_s=sweeps.seconds, seconds=seconds, quality=trail.kept, more=more, **known
        )


def reached(annealing: Trail, sweeps: float) -> dict[str, float]:
    """CPU seconds until annealing keeps nearly what it keeps in the end, and until more than the sweeps if ever."""
    nearly, more = annealing.until(NEARLY * annealing.kept), annealing.until(np.nextafter(sweeps, 1))
    found = {f"annealing: {percent(NEARLY)}": nearly, "annealing > sweeps": more}
    return {method: seconds for method, seconds in found.items() if seconds is not None}


STUDIES = (
    Study(
        title="Growth with layers, experts and devices",
        quality="hops kept, %",
        baseline="sweeps",
        note="Hops kept, and the seconds until a search settles, as model and cluster grow. "
        f"Balanced Markov transitions, rows Dirichlet(0.08). Annealing searches as long as it may, here with the"
        f" work of {BUDGET_S:g} s of time limit on two threads: its seconds are those until it keeps {percent(NEARLY)}"
        " of what it keeps `in all`, and those until it keeps more than the sweeps do in the end, simple bounds and its"
        " start by a chain and sweeps included. Where the budget ends it before it settles, the first are the budget's."
        f" Sweeps search until their own budget is spent. MB of annealing: with {percent(MEMORY_SHARE)} of the work."
        " One expert a device is solved by the chain, and proven optimal.",
        instances=_sizes,
        rows=_rows,
    ),
)
