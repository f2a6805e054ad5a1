"""Sums of contenders over a part of a trace, and over its bootstrap draws: what every metric is computed from.

Legend: U units (samples) or, where samples are re-homed, steps; B steps; L MoE layers; D devices; E experts; R the part
itself and its bootstrap draws; Q levels of a source's curves (low, middle, high).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.decisions import DispatchModel
from ...solvers.balance import max_over_mean
from ...traces.model import ModelSpec
from .intervals import Summands, resampled_sums
from .price import Seconds
from .tally import COUNTS, Tally

__all__ = ["Context", "Draws", "Sums", "device_ratios", "dropped_share", "summed"]

Draws = NDArray[np.float64]  # [R]


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One contender on one part of a trace.

    Parameters
    ----------
    tokens_per_step
        The mean over complete steps.
    dropped_share
        Of the routed token-expert pairs, where buffers have a fixed capacity.
    """

    tally: Tally
    seconds: Seconds
    dispatch_model: DispatchModel
    model: ModelSpec
    tokens_per_step: float
    dropped_share: float | None = None

    @property
    def copies_to_bytes(self) -> float | None:
        """Bytes of a step that a copy per token and layer is; None where the model's sizes are not known."""
        each = self.model.copy_bytes
        return None if each is None else self.tokens_per_step * self.model.num_layers * each


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums of a contender that are resampled: over a part and over each of its draws.

    Parameters
    ----------
    counts
        By name in `tally.COUNTS`, `[R]`; empty where only loads are known.
    balance, busy
        Of max/mean device load over the layers that are used, and the number of these, `[R]`.
    moved
        Of the share of samples moved, `[R]`; None where none can be.
    seconds, step
        Means over steps of `Seconds.levels` and `.step`, `[Q, R]`.
    """

    counts: Mapping[str, Draws]
    balance: Draws
    busy: Draws
    moved: Draws | None
    seconds: Mapping[str, NDArray[np.float64]]
    step: Summands


def summed(contexts: Sequence[Context], seed: int) -> list[Sums]:
    """The resampled sums of every contender."""
    counts_UC = [context.tally.counts for context in contexts]
    steps_BC = [_by_step(context) for context in contexts]
    counted = _products(counts_UC, seed)
    stepped = _products([np.concatenate([*columns.values()], axis=1) for columns in steps_BC], seed)
    sums = []
    for counts_RC, steps_RC, columns in zip(counted, stepped, steps_BC, strict=True):
        num_steps = len(next(iter(columns.values())))
        widths = np.cumsum([column_BC.shape[1] for column_BC in columns.values()])[:-1]
        of = dict(zip(columns, np.split(steps_RC, widths, axis=1), strict=True))
        means = {name: sums_RQ.T / num_steps for name, sums_RQ in of.items()}
        sums.append(
            Sums(
                counts=dict(zip(COUNTS, counts_RC.T, strict=False)) if counts_RC.shape[1] else {},
                balance=of["balance"][:, 0],
                busy=of["balance"][:, 1],
                moved=means["moved"][0] if "moved" in means else None,
                seconds={key[1]: means[key] for key in means if key[0] == "levels"},
                step={key[1]: means[key] for key in means if key[0] == "step"},
            )
        )
    return sums


def _by_step(context: Context) -> dict[Any, NDArray[np.float64]]:
    """Quantities of a contender that are summed over steps, `[B, ...]`, by key."""
    ratio_BL = device_ratios(context.tally)
    columns: dict[Any, NDArray[np.float64]] = {
        "balance": np.stack([ratio_BL.sum(axis=1), (ratio_BL > 0).sum(axis=1)], axis=1)
    }
    if context.tally.moved is not None:
        columns["moved"] = context.tally.moved[:, None]
    columns |= {("levels", name): levels_QB.T for name, levels_QB in context.seconds.levels.items()}
    return columns | {("step", source): levels_QB.T for source, levels_QB in context.seconds.step.items()}


def _products(columns: Sequence[NDArray[Any]], seed: int) -> list[NDArray[np.float64]]:
    """The resampled sums of several contenders' columns, `[R, C]` each, by one product for those of as many rows."""
    sums: dict[int, NDArray[np.float64]] = {}
    for num_rows in {len(one) for one in columns}:
        at = [number for number, one in enumerate(columns) if len(one) == num_rows]
        widths = np.cumsum([columns[number].shape[1] for number in at])[:-1]
        together = np.concatenate([columns[number] for number in at], axis=1)
        sums |= dict(zip(at, np.split(resampled_sums(together, seed=seed), widths, axis=1), strict=True))
    return [sums[number] for number in range(len(columns))]


def device_ratios(tally: Tally) -> NDArray[np.float64]:
    """The busiest device over the mean of those with slots, `[B, L]`; 0 without any load."""
    return max_over_mean(tally.loads[:, :, tally.slots > 0], idle=0.0)


def dropped_share(sent_BLDE: NDArray[np.int32], rows_BL: NDArray[np.int64]) -> float:
    """Share of routed pairs dropped, with buffers of `rows_BL` rows per expert and sending device."""
    return float(np.maximum(sent_BLDE - rows_BL[:, :, None, None], 0).sum() / sent_BLDE.sum())
