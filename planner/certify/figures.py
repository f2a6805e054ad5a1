"""Metrics and intervals from a recount: the naive twin of `planner.measures.metrics` and `planner.measures.intervals`.

Legend: U units; B steps; R draws; Q levels of a curve (low, middle, high).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.plan import Plan
from .recount import Ledger
from .structure import slot_widths

__all__ = ["Recounted", "gain_interval", "interval_of", "middle", "recounted", "weighted"]

DRAWS = 1000
CURVE = {  # of a step's parts: those of one curve are low, or high, together
    "dispatch_s": "all_to_all",
    "combine_s": "all_to_all",
    "kv_s": "all_gather",
    "experts_s": "expert_ffn",
    "attention_s": "attention",
}
PIPELINED = {"attention_s": "attention", "moe_s": "moe", "moe_backward_s": "moe"}  # any levels of two curves are one
Draws = dict[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Recounted:
    """Metric name to value, and where it has an interval to its resampled summands `[Q, R]`, curve by curve."""

    value: dict[str, float]
    draws: dict[str, Draws]


def recounted(plan: Plan, ledger: Ledger, *, coherent: bool, seconds: Mapping[str, NDArray[np.float64]]) -> Recounted:
    """Every metric of a ledger; seconds `[Q, B]` by metric, their middle level the fits'."""
    if not ledger.sums:  # counts alone
        return _recounted_loads(plan, ledger, seconds)
    model, sums = plan.model, _resampled(ledger, plan.seed)
    cells = sums["tokens"] * model.num_layers
    figures = {name: sums[name] / cells for name in ("device_copies", "node_copies")}
    if ledger.sums["hops"].any():
        with np.errstate(invalid="ignore"):
            figures |= {name: sums[name] / sums["hops"] for name in ("hops_kept", "node_hops_kept")}
    step_tokens = ledger.step_tokens / len(ledger.loads)
    per_copy = step_tokens * model.num_layers * (model.dtype_bytes or 0) * (model.hidden_size or 0)
    if per_copy:
        figures["inter_bytes"] = per_copy * sums["far_copies"] / cells
        figures["intra_bytes"] = per_copy * (sums["device_copies"] - sums["far_copies"]) / cells
    value = {name: float(x[0]) for name, x in figures.items()}
    draws = {name: {"": x[None, 1:]} for name, x in figures.items()}
    if coherent and model.attention.kv_size and model.dtype_bytes:
        others = plan.cluster.num_devices - 1
        value["kv_bytes"] = step_tokens * model.num_layers * model.attention.kv_size * model.dtype_bytes * others
    _add_balance(ledger.loads[:, :, np.array(slot_widths(plan)) > 0], plan.seed, value, draws)
    value |= {name: float(middle(levels_QB).mean()) for name, levels_QB in seconds.items()}
    _draw_seconds(seconds, plan.seed, draws)
    return Recounted(value, draws)


def weighted(parts: Sequence[tuple[float, Recounted]]) -> Recounted:
    """Weighted means of the figures that all have, draw by draw and curve by curve."""
    value, draws = dict[str, float](), dict[str, Draws]()
    for name in parts[0][1].value:
        if all(name in one.value for _, one in parts):
            value[name] = sum(weight * one.value[name] for weight, one in parts)
        if name in value and all(name in one.draws for _, one in parts):
            curves = parts[0][1].draws[name]
            draws[name] = {
                curve: np.sum([weight * one.draws[name][curve] for weight, one in parts], axis=0) for curve in curves
            }
    return Recounted(value, draws)


def _recounted_loads(plan: Plan, ledger: Ledger, seconds: Mapping[str, NDArray[np.float64]]) -> Recounted:
    """What loads alone tell."""
    value, draws = dict[str, float](), dict[str, Draws]()
    _add_balance(ledger.loads[:, :, np.array(slot_widths(plan)) > 0], plan.seed, value, draws)
    value |= {name: float(middle(levels_QB).mean()) for name, levels_QB in seconds.items()}
    _draw_seconds(seconds, plan.seed, draws)
    return Recounted(value, draws)


def _draw_seconds(seconds: Mapping[str, NDArray[np.float64]], seed: int, draws: dict[str, Draws]) -> None:
    """Means over the steps of each resampling; over the only step as it is."""
    for name, levels_QB in seconds.items():
        picks = _picks(levels_QB.shape[1], seed) if levels_QB.shape[1] > 1 else [np.zeros(1, np.int64)]
        draws[name] = {name: np.stack([levels_QB[:, pick].mean(axis=1) for pick in picks], axis=1)}
    if "step_s" in seconds:
        curve_of, step = PIPELINED if "moe_s" in seconds else CURVE, Draws()
        for part in (part for part in curve_of if part in seconds):
            step[curve_of[part]] = step.get(curve_of[part], np.zeros(1)) + draws[part][part]
        draws["step_s"] = step


def _picks(number: int, seed: int) -> list[NDArray[np.int64]]:
    """The resamplings of so many steps."""
    rng = np.random.default_rng(seed)
    return [rng.integers(number, size=number) for _ in range(DRAWS)]


def _resampled(ledger: Ledger, seed: int) -> dict[str, NDArray[np.float64]]:
    """Sums over all units, then over each resampling of them, by name."""
    rows_UC = np.stack(list(ledger.sums.values()), axis=1)
    rng = np.random.default_rng(seed)
    samples = [rows_UC.sum(axis=0)]
    number = len(rows_UC)
    samples += [rows_UC[rng.integers(number, size=number)].sum(axis=0) for _ in range(DRAWS if number > 1 else 1)]
    return {name: np.array([row[i] for row in samples], dtype=float) for i, name in enumerate(ledger.sums)}


def _add_balance(loads_BLD: NDArray[Any], seed: int, value: dict[str, float], draws: dict[str, Draws]) -> None:
    cells = [[float(row.max() / row.mean()) for row in step if row.any()] for step in loads_BLD]
    flat = [cell for step in cells for cell in step]
    if not flat:
        return
    value["balance"], value["balance_p95"] = sum(flat) / len(flat), float(np.quantile(flat, 0.95))
    if len(cells) > 1:
        total_B, number_B = np.array([sum(step) for step in cells]), np.array([len(step) for step in cells])
        picks = _picks(len(cells), seed)
        with np.errstate(invalid="ignore"):
            draws["balance"] = {"": np.array([[total_B[pick].sum() / number_B[pick].sum() for pick in picks]])}


def middle(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of levels in ascending order, or of every pair of two such, the one without errors."""
    found: NDArray[np.float64] = levels[len(levels) // 2]
    return found


def interval_of(draws: Draws | None) -> tuple[float | None, float | None]:
    """The 95 % interval of a sum of summands, each curve at its least for the low and at its most for the high end.

    None for both of what is undefined, and of a single unit, or step whose curves have no error.
    """
    if not draws:
        return None, None
    least_R, most_R = (np.sum([worst(one, axis=0) for one in draws.values()], axis=0) for worst in (np.min, np.max))
    kept_R = np.isfinite(least_R)
    if not kept_R.any() or (len(kept_R) == 1 and least_R[0] == most_R[0]):
        return None, None
    return float(np.quantile(least_R[kept_R], 0.025)), float(np.quantile(most_R[kept_R], 0.975))


def gain_interval(metric: str, ours: Recounted, theirs: Recounted) -> tuple[float | None, float | None]:
    """The interval of how much less we have, draw by draw and under the same curves; none from a single step."""
    mine, other = ours.draws.get(metric, {}), theirs.draws.get(metric, {})
    if not mine or not other or next(iter(mine.values())).shape[1] == 1:
        return None, None
    nothing = np.zeros((1, 1))
    return interval_of({curve: other.get(curve, nothing) - mine.get(curve, nothing) for curve in {**mine, **other}})
