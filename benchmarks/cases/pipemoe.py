"""PipeMoE's degrees on Table IV: where Algorithm 1 goes wrong, what unequal chunks add, and what a call costs.

Quality is measured against brute force over r = 1 .. 4000, every degree's t(r) at once, in the same run.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.optimize  # noqa: F401  imports are not part of the times

from moeplan.solvers.pipemoe import optimal_degree, optimal_degrees, unequal_chunks
from moeplan.solvers.pipemoe.seconds import layer_seconds

from ..pipemoe_presets import PRESETS, Preset, table_iv
from ..race import Call, race
from ..study import Row, Settings, Study

Array = np.ndarray
MOST = 4000
WRONG = 1e-9  # relatively; less is rounding
LAYERS = (1, 10, 100, 1000, 10_000)
DEGREES = (16, 64, 256, 1024, 4096, 16_384)


def _table_iv(instance: tuple[str, int]) -> Iterator[Row]:
    name, top_k = instance
    known, (n_d, n_e) = _constants(PRESETS[name]), _works(top_k)
    works, which = np.unique(np.stack([n_d, n_e]), axis=1, return_inverse=True)
    calls: dict[str, Call] = {
        "brute force": lambda: 1 + _every_degree(known, n_d, n_e).argmin(axis=1),
        "exact": lambda: optimal_degrees(**known, n_d=n_d, n_e=n_e).forward,
        "Algorithm 1": lambda: np.array([_printed(known, *work) for work in works.T])[which],
        "always 2": lambda: np.full(len(n_d), 2),
    }
    table_LR = _every_degree(known, n_d, n_e)
    for method, timing in race(calls, "brute force", rounds=1).items():
        loss_L = table_LR[np.arange(len(n_d)), timing.value - 1] / table_LR.min(axis=1) - 1
        lost = loss_L[loss_L > WRONG]
        more = {"wrong layers": len(lost), "worst, %": float(loss_L.max())}
        mean = float(lost.mean()) if len(lost) else 0.0
        yield Row(f"{name} k={top_k}", method, quality=mean, bound=0.0, more=more, **timing.figures)


def _chunks(name: str) -> Iterator[Row]:
    known, works = _constants(PRESETS[name]), list(zip(*_works(1), strict=True))
    calls = {"": lambda: [unequal_chunks(**known, n_d=n_d, n_e=n_e) for n_d, n_e in works]}
    timing = race(calls, rounds=1, memory=False)[""]
    gains = np.array([1 - one.outcome.objective.value / one.equal_s for one in timing.value])
    more = {"helped, %": float((gains > 0).mean()), "most, %": float(gains.max())}
    yield Row(name, "unequal chunks", quality=float(gains[gains > 0].mean()), more=more, **timing.figures)


def _sizes(settings: Settings) -> list[tuple[str, int, int]]:
    layers = [("layers L, degrees to 4,000", size, MOST) for size in LAYERS[: 3 if settings.quick else None]]
    return layers + [("highest degree, 100 layers", 100, size) for size in DEGREES[: 3 if settings.quick else None]]


def _cost(instance: tuple[str, int, int]) -> Iterator[Row]:
    axis, num_layers, most = instance
    rng, known = np.random.default_rng(0), _constants(PRESETS["rtx2080ti-16"])
    n_d = rng.uniform(1e6, 1e9, num_layers)
    n_e = n_d * rng.choice([256, 512, 1024, 2048], num_layers)
    first: dict[str, Any] = {"n_d": float(n_d[0]), "n_e": float(n_e[0])}
    calls: dict[str, Call] = {
        "optimal_degrees": lambda: optimal_degrees(**known, n_d=n_d, n_e=n_e, max_degree=most).forward
    }
    if num_layers <= 1000:
        calls["brute force"] = lambda: 1 + _every_degree(known, n_d, n_e, most).argmin(axis=1)
    if num_layers == 1:
        calls["optimal_degree"] = lambda: optimal_degree(**known, **first, max_degree=most).forward
        calls["Algorithm 1"] = lambda: _printed(known, **first)
    for method, timing in race(calls, "brute force" if "brute force" in calls else "").items():
        r_L = np.atleast_1d(timing.value)
        reached_L, least_L = _at(known, n_d, n_e, r_L), _at(known, n_d, n_e, _best(known, n_d, n_e, most))
        lost, size = float((reached_L / least_L - 1).max()), num_layers if axis.startswith("layers") else most
        name = f"L={num_layers:,} r<={most:,}"
        yield Row(name, method, quality=lost, bound=0.0, axis=axis, size=size, **timing.figures)


def _constants(preset: Preset) -> dict[str, Any]:
    return {"a_a": preset.a_a, "b_a": preset.b_a, "a_e": preset.a_e, "b_e": preset.b_e}


def _works(top_k: int) -> tuple[Array, Array]:
    layers = list(table_iv())
    n_d = [layer.dispatched_bytes(top_k=top_k) for layer in layers]
    return np.array(n_d), np.array([layer.multiply_adds(top_k=top_k) for layer in layers])


def _every_degree(known: dict[str, Any], n_d: Array, n_e: Array, most: int = MOST) -> Array:
    return _at(known, n_d[:, None], n_e[:, None], np.arange(1, most + 1))


def _best(known: dict[str, Any], n_d: Array, n_e: Array, most: int) -> Array:
    """The best degrees, layer by layer, so that memory stays small."""
    return np.array([1 + _every_degree(known, d[None], e[None], most).argmin() for d, e in zip(n_d, n_e, strict=True)])


def _at(known: dict[str, Any], n_d: Array, n_e: Array, r: Array) -> Array:
    t_d = known["a_a"] + known["b_a"] * n_d / r
    return layer_seconds(r, t_d, known["a_e"] + known["b_e"] * n_e / r, t_d)


def _printed(known: dict[str, Any], n_d: float, n_e: float) -> int:
    return optimal_degree(**known, n_d=float(n_d), n_e=float(n_e), backward=0, method="paper").forward


STUDIES = (
    Study(
        title="Table IV: degrees of 288 layers",
        quality="mean loss where wrong, %",
        baseline="brute force",
        note="How much slower than the best degree each method's choice is, and in how many layers. "
        "Forward, against brute force over r = 1 to 4000. Algorithm 1 is the paper's as printed, with SciPy's"
        " SLSQP, each distinct layer once; `exact` gives forward, backward and joint degrees in one vectorised call.",
        instances=lambda settings: [(name, k) for name in PRESETS for k in ((1,) if settings.quick else (1, 2))],
        rows=_table_iv,
    ),
    Study(
        title="Table IV: unequal chunks against the best equal ones",
        quality="mean gain where it helps, %",
        note="How much unequal chunks gain over the best equal ones, where they help. "
        "Forward, k = 1; seconds of all 288 layers.",
        instances=lambda settings: list(PRESETS)[: 1 if settings.quick else None],
        rows=_chunks,
    ),
    Study(
        title="What a call costs",
        quality="largest loss, %",
        baseline="brute force",
        note="Seconds of one call of each method, as layers and degrees grow. "
        "`optimal_degree` and `optimal_degrees` find forward, backward and joint degrees; brute force and"
        " Algorithm 1 the forward one only. Brute force is NumPy over all layers and degrees at once.",
        instances=_sizes,
        rows=_cost,
    ),
)
