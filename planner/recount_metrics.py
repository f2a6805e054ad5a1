"""Metrics and intervals from a recount: the naive twin of `planner.metrics` and `planner.intervals`."""

import numpy as np
from numpy.typing import NDArray

from ..runtime.plan import Plan
from .recount import Ledger

__all__ = ["quantiles", "recounted_metrics"]

DRAWS = 1000


def recounted_metrics(
    plan: Plan, ledger: Ledger, *, coherent: bool
) -> tuple[dict[str, float], dict[str, NDArray[np.float64]]]:
    """Metric name to value, and metric name to its resampled values, from a ledger."""
    names = list(ledger.sums)
    rows_UC = np.stack([ledger.sums[name] for name in names], axis=1)
    rng = np.random.default_rng(plan.seed)
    samples = [rows_UC.sum(axis=0)]
    samples += [rows_UC[rng.integers(len(rows_UC), size=len(rows_UC))].sum(axis=0) for _ in range(DRAWS)]
    sums = {name: np.array([row[i] for row in samples], dtype=float) for i, name in enumerate(names)}
    figures: dict[str, NDArray[np.float64]] = {}
    for name in ("device_copies", "node_copies"):
        figures[name] = sums[name] / (sums["tokens"] * plan.model.num_layers)
    if ledger.sums["hops"].any():
        with np.errstate(invalid="ignore"):
            figures |= {name: sums[name] / sums["hops"] for name in ("hops_kept", "node_hops_kept")}
    model = plan.model
    step_tokens = ledger.step_tokens / len(ledger.loads)
    per_copy = step_tokens * model.num_layers * (model.dtype_bytes or 0) * (model.hidden_size or 0)
    if per_copy:
        figures["inter_bytes"] = per_copy * figures["node_copies"]
        figures["intra_bytes"] = per_copy * (figures["device_copies"] - figures["node_copies"])
    value = {name: float(x[0]) for name, x in figures.items()}
    draws = {name: x[1:] for name, x in figures.items()}
    if coherent and model.attention.kv_size and model.dtype_bytes:
        others = plan.cluster.num_devices - 1
        value["kv_bytes"] = step_tokens * model.num_layers * model.attention.kv_size * model.dtype_bytes * others
    _add_balance(ledger.loads, plan.seed, value, draws)
    return value, draws


def _add_balance(
    loads_BLD: NDArray[np.int64], seed: int, value: dict[str, float], draws: dict[str, NDArray[np.float64]]
) -> None:
    cells = [[float(row.max() / row.mean()) for row in step if row.any()] for step in loads_BLD]
    flat = [cell for step in cells for cell in step]
    if not flat:
        return
    value["balance"], value["balance_p95"] = sum(flat) / len(flat), float(np.quantile(flat, 0.95))
    if len(cells) > 1:
        rng = np.random.default_rng(seed)
        total_B, number_B = np.array([sum(step) for step in cells]), np.array([len(step) for step in cells])
        picks = [rng.integers(len(cells), size=len(cells)) for _ in range(DRAWS)]
        with np.errstate(invalid="ignore"):
            draws["balance"] = np.array([total_B[pick].sum() / number_B[pick].sum() for pick in picks])


def quantiles(draws: NDArray[np.float64] | None) -> tuple[float | None, float | None]:
    """The 95 % interval of resampled figures; None where there are none."""
    if draws is None or not np.isfinite(draws).any():
        return None, None
    ordered = np.sort(draws[np.isfinite(draws)])
    return tuple(float(np.quantile(ordered, q)) for q in (0.025, 0.975))  # type: ignore[return-value]
