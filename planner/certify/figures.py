"""Metrics and intervals from a recount: the naive twin of `planner.metrics` and `planner.intervals`."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...runtime.plan import Plan
from .recount import Ledger
from .structure import slot_widths

__all__ = ["Recounted", "interval_of", "recounted"]

DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Recounted:
    """Metric name to value, and to its resampled values where it has an interval."""

    value: dict[str, float]
    draws: dict[str, NDArray[np.float64]]


def recounted(plan: Plan, ledger: Ledger, *, coherent: bool, seconds: Mapping[str, NDArray[np.float64]]) -> Recounted:
    """Every metric of a ledger; seconds `[Q, B]` by metric."""
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
    draws = {name: x[1:] for name, x in figures.items()}
    if coherent and model.attention.kv_size and model.dtype_bytes:
        others = plan.cluster.num_devices - 1
        value["kv_bytes"] = step_tokens * model.num_layers * model.attention.kv_size * model.dtype_bytes * others
    _add_balance(ledger.loads[:, :, np.array(slot_widths(plan)) > 0], plan.seed, value, draws)
    picks = _picks(len(ledger.loads), plan.seed)
    for name, levels_QB in seconds.items():
        value[name] = float(levels_QB[1].mean())
        if levels_QB.shape[1] > 1:
            draws[name] = np.stack([levels_QB[:, pick].mean(axis=1) for pick in picks], axis=1)
    return Recounted(value, draws)


def _picks(number: int, seed: int) -> list[NDArray[np.int64]]:
    """The resamplings of so many steps."""
    rng = np.random.default_rng(seed)
    return [rng.integers(number, size=number) for _ in range(DRAWS)]


def _resampled(ledger: Ledger, seed: int) -> dict[str, NDArray[np.float64]]:
    """Sums over all units, then over each resampling of them, by name."""
    rows_UC = np.stack(list(ledger.sums.values()), axis=1)
    rng = np.random.default_rng(seed)
    samples = [rows_UC.sum(axis=0)]
    samples += [rows_UC[rng.integers(len(rows_UC), size=len(rows_UC))].sum(axis=0) for _ in range(DRAWS)]
    return {name: np.array([row[i] for row in samples], dtype=float) for i, name in enumerate(ledger.sums)}


def _add_balance(
    loads_BLD: NDArray[np.int64], seed: int, value: dict[str, float], draws: dict[str, NDArray[np.float64]]
) -> None:
    cells = [[float(row.max() / row.mean()) for row in step if row.any()] for step in loads_BLD]
    flat = [cell for step in cells for cell in step]
    if not flat:
        return
    value["balance"], value["balance_p95"] = sum(flat) / len(flat), float(np.quantile(flat, 0.95))
    if len(cells) > 1:
        total_B, number_B = np.array([sum(step) for step in cells]), np.array([len(step) for step in cells])
        picks = _picks(len(cells), seed)
        with np.errstate(invalid="ignore"):
            draws["balance"] = np.array([total_B[pick].sum() / number_B[pick].sum() for pick in picks])


def interval_of(draws: NDArray[np.float64] | None) -> tuple[float | None, float | None]:
    """The 95 % interval of resampled figures, the widest of several levels; None where there are none."""
    if draws is None or not np.isfinite(draws).any():
        return None, None
    levels = [np.sort(row[np.isfinite(row)]) for row in draws.reshape(-1, draws.shape[-1])]
    ends = [(float(np.quantile(row, 0.025)), float(np.quantile(row, 0.975))) for row in levels if len(row)]
    return min(low for low, _ in ends), max(high for _, high in ends)
