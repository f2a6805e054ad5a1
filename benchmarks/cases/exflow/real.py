"""Held-out quality on real routing: the chain alone, sweeps, annealing.

Legend: W transitions `[L-1, E, E]`; D devices.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeplan.solvers.cost import hops_kept

from ...race import race
from ...routing import GPT_OSS, gpt_oss
from ...study import Row, Settings, Study
from .trail import Trail, annealed, chained, held_bytes, swept

Array = np.ndarray
DEVICES = (4, 8, 16, 32)
BUDGETS_S = (10.0, 20.0)
MEMORY_S = 1.0  # of annealing: what it holds does not grow with its budget


@dataclass(frozen=True, slots=True)
class _Case:
    """Transitions W to fit and to judge by, the devices, and annealing's budgets."""

    halves: Callable[[], tuple[Array, Array]]
    num_devices: int
    budgets_s: tuple[float, ...]


def _cases(settings: Settings) -> list[_Case]:
    def halves() -> tuple[Array, Array]:
        routing = gpt_oss(settings.data)
        even = routing.even()
        return routing.transitions(even), routing.transitions(~even)

    devices, budgets_s = (DEVICES[2:], (0.5,)) if settings.quick else (DEVICES, BUDGETS_S)
    return [_Case(halves, num_devices, budgets_s) for num_devices in devices]


def _rows(case: _Case) -> Iterator[Row]:
    (fit, unseen), devices = case.halves(), case.num_devices
    name, sweeps = f"gpt-oss-20b D={devices}", swept(fit, devices)
    start = race({"chain": lambda: chained(fit, devices)}, budget_s=0.1)["chain"]
    figures = {**start.figures, "ratio": sweeps.seconds / start.seconds}
    fitted, held_out = (float(w[start.value].sum() / w.sum()) for w in (fit, unseen))
    yield Row(name, "chain", quality=held_out, bound=sweeps.bound, more={"fitted, %": fitted}, **figures)
    held = held_bytes(fit, devices, MEMORY_S)
    yield _row(name, "sweeps", sweeps, unseen, sweeps.seconds, held["sweeps"])
    for budget_s in case.budgets_s:
        trail = annealed(fit, devices, budget_s)
        yield _row(name, f"annealing {budget_s:g} s", trail, unseen, sweeps.seconds, held["annealing"])


def _row(name: str, method: str, trail: Trail, unseen: Array, baseline_s: float, memory_bytes: int) -> Row:
    kept = float(hops_kept(unseen, trail.placement, trail.placement.num_devices).device.sum() / unseen.sum())
    known: dict[str, Any] = {"memory_bytes": memory_bytes, "more": {"fitted, %": trail.kept}}
    return trail.row(name, method, baseline_s=baseline_s, quality=kept, **known)


STUDIES = (
    Study(
        title="Real routing",
        quality="top-1 hops kept on unseen samples, %",
        baseline="sweeps",
        note="Hops that stay on their device on unseen samples of gpt-oss-20b, by method and budget. "
        "Fitted on the even sample ids, judged on the odd ones. The bound is the fitted half's, `fitted` what is"
        " kept there; unseen samples have no proven bound. Annealing gets the work of so many seconds of time limit on"
        " two threads; seconds are those of both.",
        needs=GPT_OSS,
        instances=_cases,
        rows=_rows,
    ),
)
