"""PipeMoE's degrees on Table IV: where Algorithm 1 goes wrong, what unequal chunks add, and what a call costs.

Quality is measured against a brute force over r = 1 .. 4000 in the same run; seconds are medians, beside those of the
brute force and of Algorithm 1 with SciPy's SLSQP as the paper runs it.

Run: python benchmarks/pipemoe.py
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize  # noqa: F401  imports are not part of the times

from moeplan.solvers.pipemoe import optimal_degree, optimal_degrees, unequal_chunks
from moeplan.solvers.pipemoe.configurations import table_iv
from moeplan.solvers.pipemoe.presets import PRESETS, Preset
from moeplan.solvers.pipemoe.seconds import layer_seconds

Array = np.ndarray
DEGREES = np.arange(1, 4001)


def main() -> None:
    """Print the three tables."""
    _quality()
    _chunks()
    _cost()


def _quality() -> None:
    print("Table IV, 288 layers, forward: how often a method misses the best of 4000 degrees, and the seconds it loses")
    print(f"{'preset':14} {'k':>2} {'method':12} {'wrong':>6} {'share':>7} {'mean loss':>10} {'worst':>7}  degrees")
    for name, preset in PRESETS.items():
        for top_k in (1, 2):
            n_d, n_e = _works(top_k)
            table = _brute_force(preset, n_d, n_e)
            printed = {work: _printed(preset, *work) for work in set(zip(n_d, n_e, strict=True))}
            rows = {
                "exact": optimal_degrees(**_constants(preset), n_d=n_d, n_e=n_e).forward,
                "Algorithm 1": np.array([printed[work] for work in zip(n_d, n_e, strict=True)]),
                "always 2": np.full(len(n_d), 2),
            }
            for method, degrees in rows.items():
                loss = table[np.arange(len(n_d)), degrees - 1] / table.min(axis=1) - 1
                lost = loss[loss > 1e-9]
                print(
                    f"{name:14} {top_k:2} {method:12} {len(lost):6} {len(lost) / len(loss):7.1%}"
                    f" {lost.mean() if len(lost) else 0:10.1%} {loss.max():7.1%}  {degrees.min()}-{degrees.max()}"
                )


def _chunks() -> None:
    print("\nTable IV, k = 1, forward: unequal chunks against the best equal ones")
    print(f"{'preset':14} {'helps':>7} {'mean gain there':>16} {'most':>7} {'mean ms':>8}")
    for name, preset in PRESETS.items():
        found = [unequal_chunks(**_constants(preset), n_d=n_d, n_e=n_e) for n_d, n_e in zip(*_works(1), strict=True)]
        gains = np.array([1 - one.outcome.objective.value / one.equal_s for one in found])
        helped, wall_s = gains[gains > 0], np.mean([one.outcome.wall_s for one in found])
        print(f"{name:14} {len(helped) / 288:7.1%} {helped.mean():16.1%} {gains.max():7.1%} {1e3 * wall_s:8.2f}")


def _cost() -> None:
    preset, rng = PRESETS["rtx2080ti-16"], np.random.default_rng(0)
    known, n_d = _constants(preset), rng.uniform(1e6, 1e9, 1000)
    n_e = n_d * rng.choice([256, 512, 1024, 2048], 1000)
    one: dict[str, Any] = {"n_d": float(n_d[0]), "n_e": float(n_e[0])}
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "optimal_degree, three degrees": (lambda: optimal_degree(**known, **one), 2000),
        "brute force r = 1 .. 4000, forward": (lambda: _brute_force(preset, n_d[:1], n_e[:1]).argmin(), 200),
        "Algorithm 1 (SLSQP), forward": (lambda: _printed(preset, **one), 50),
    }
    many: dict[str, tuple[Callable[[], object], int]] = {
        "optimal_degrees, three degrees": (lambda: optimal_degrees(**known, n_d=n_d, n_e=n_e), 200),
        "brute force r = 1 .. 4000, forward": (lambda: _brute_force(preset, n_d, n_e).argmin(axis=1), 3),
    }
    for title, unit, rows in (("one layer", 1e6, calls), ("1,000 layers", 1e3, many)):
        print(f"\n{title:38} {'us' if unit == 1e6 else 'ms':>10} {'ratio':>8}")
        medians = {name: _median_s(*row) for name, row in rows.items()}
        first = next(iter(medians.values()))
        for name, median_s in medians.items():
            print(f"{name:38} {unit * median_s:10.2f} {median_s / first:8.1f}")


def _constants(preset: Preset) -> dict[str, Any]:
    return {"a_a": preset.a_a, "b_a": preset.b_a, "a_e": preset.a_e, "b_e": preset.b_e}


def _works(top_k: int) -> tuple[Array, Array]:
    layers = list(table_iv())
    n_d = [layer.dispatched_bytes(top_k=top_k) for layer in layers]
    return np.array(n_d), np.array([layer.multiply_adds(top_k=top_k) for layer in layers])


def _brute_force(preset: Preset, n_d: Array, n_e: Array) -> Array:
    t_d = preset.a_a + preset.b_a * n_d[:, None] / DEGREES
    return layer_seconds(DEGREES, t_d, preset.a_e + preset.b_e * n_e[:, None] / DEGREES, t_d)


def _printed(preset: Preset, n_d: float, n_e: float) -> int:
    return optimal_degree(**_constants(preset), n_d=n_d, n_e=n_e, backward=0, method="paper").forward


def _median_s(call: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))


if __name__ == "__main__":
    main()
