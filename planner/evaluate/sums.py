"""Sums of contenders over a part of a trace and over its bootstrap draws, and the 95 % intervals that these give.

Intervals are paired: every figure of a part is resampled with the same draws.

Legend: U units (samples) or, where samples are re-homed, steps; B steps; L MoE layers; D devices; E experts; C columns;
R the part itself and its bootstrap draws; Q levels of a source's curves (low, middle, high).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.decisions import DispatchModel
from ...runtime.wire import Wire
from ...solvers.arrays import Floats, Ints
from ...solvers.balance import max_over_mean
from ...traces.model import ModelSpec
from .price import Seconds
from .steps import Blocks
from .tally import COUNTS, Tally

DRAWS = 1000
BLOCK = 64  # draws at a time, so that their weights stay small

Draws = Floats  # [R]
# A figure as a sum over sources of fit error: of each its curves' levels on the part and its draws, `[Q, R]`.
Summands = Mapping[str, Floats]


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Contender on one part of a trace."""

    tally: Tally
    seconds: Seconds
    dispatch_model: DispatchModel
    model: ModelSpec
    tokens_per_step: float  #: The mean over complete steps
    dropped_share: float | None = None  #: Of the routed token-expert pairs, where buffers have a fixed capacity
    record_steps: int = 1  #: That a recorded step stands for
    drawn: "Drawn | None" = None  #: None where the steps themselves are resampled
    wire: Wire | None = None  #: The form in which hidden vectors travel


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Steps drawn from the blocks of a part whose own are no sample, several a draw."""

    blocks: Blocks
    ratio: Floats  #: Busiest device over the mean, mean over layers, `[B]`
    seconds: Seconds

    def around(self, value_XB: Floats, drawn_XB: Floats, least: float = 0.0) -> Floats:
        """Means over steps of figures of a part, and over the steps of each draw, about them, `[X, R]`.

        Drawing blocks twice makes steps less even than any, so draws are moved until their mean is the value, and
        kept from below the `least` that is possible.
        """
        value_X1 = value_XB.mean(axis=1, keepdims=True)
        mean_XR = drawn_XB.reshape(len(drawn_XB), -1, self.blocks.each).mean(axis=2)
        mean_XR = mean_XR[:, np.arange(DRAWS) % mean_XR.shape[1]]  # as many as of parts that are resampled
        moved_XR = value_X1 + self.blocks.spread * (mean_XR - mean_XR.mean(axis=1, keepdims=True))
        return np.concatenate([value_X1, np.maximum(moved_XR, least)], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums of a contender that are resampled: over a part and over each of its draws."""

    counts: Mapping[str, Draws]  #: By name in `tally.COUNTS`, `[R]`; empty where only loads are known
    #: balance, busy: of max/mean device load over the layers that are used, and the number of these, `[R]`
    balance: Draws
    busy: Draws
    moved: Draws | None  #: Of the share of samples moved, `[R]`; None where none can be
    #: seconds, step: means over steps of `Seconds.levels` and `.step`, `[Q, R]`
    seconds: Mapping[str, Floats]
    step: Summands


def summed(contexts: Sequence[Context], seed: int) -> list[Sums]:
    """The resampled sums of every contender: over units and steps, or over steps drawn from blocks of a part's own."""
    sums = []
    for context, drawn_RC in zip(contexts, _resampled([_columns(context) for context in contexts], seed), strict=True):
        counts = dict(zip(COUNTS, drawn_RC["counts"].T, strict=False))
        if context.drawn is not None:
            sums.append(_sums_drawn(context, context.drawn, counts))
            continue
        means = {key: column_RC.T / len(context.tally.loads) for key, column_RC in drawn_RC.items()}
        sums.append(
            Sums(
                counts=counts,
                balance=drawn_RC["balance"][:, 0],
                busy=drawn_RC["balance"][:, 1],
                moved=means["moved"][0] if "moved" in means else None,
                seconds={name: means["levels", name] for name in context.seconds.levels},
                step={source: means["step", source] for source in context.seconds.step},
            )
        )
    return sums


def _columns(context: Context) -> dict[Any, NDArray[Any]]:
    """Quantities of a contender that are summed over units, `[U, C]`, or over steps, `[B, C]`, by key."""
    tally, seconds = context.tally, context.seconds
    columns: dict[Any, NDArray[Any]] = {"counts": tally.counts}
    if context.drawn is not None:
        return columns
    ratio_BL = device_ratios(tally)
    columns["balance"] = np.stack([ratio_BL.sum(axis=1), (ratio_BL > 0).sum(axis=1)], axis=1)
    if tally.moved is not None:
        columns["moved"] = tally.moved[:, None]
    columns |= {("levels", name): levels_QB.T for name, levels_QB in seconds.levels.items()}
    return columns | {("step", source): levels_QB.T for source, levels_QB in seconds.step.items()}


def _sums_drawn(context: Context, drawn: Drawn, counts: Mapping[str, Draws]) -> Sums:
    """Sums of a contender whose intervals come from steps drawn from blocks."""
    tally, seconds = context.tally, context.seconds
    (balance_R,) = drawn.around(mean_ratio(tally)[None], drawn.ratio[None], least=1.0)
    return Sums(
        counts=counts,
        balance=balance_R,
        busy=np.full(len(balance_R), float(tally.loads.any())),
        moved=None,
        seconds={
            name: drawn.around(levels_QB, drawn.seconds.levels[name]) for name, levels_QB in seconds.levels.items()
        },
        step={
            source: drawn.around(levels_QB, drawn.seconds.step[source]) for source, levels_QB in seconds.step.items()
        },
    )


def _resampled(blocks: Sequence[Mapping[Any, NDArray[Any]]], seed: int) -> list[dict[Any, Floats]]:
    """Resampled sums of contenders' columns, `[R, C]` by key: one matrix product for columns of equal length."""
    sums: list[dict[Any, Floats]] = [{} for _ in blocks]
    columns = [(number, key, block[key]) for number, block in enumerate(blocks) for key in block]
    for num_rows in {len(rows) for _, _, rows in columns}:
        alike = [column for column in columns if len(column[2]) == num_rows]
        widths = np.cumsum([rows.shape[1] for _, _, rows in alike])[:-1]
        together = resampled_sums(np.concatenate([rows for _, _, rows in alike], axis=1), seed=seed)
        for (number, key, _), sums_RC in zip(alike, np.split(together, widths, axis=1), strict=True):
            sums[number][key] = sums_RC
    return sums


def device_ratios(tally: Tally) -> Floats:
    """The busiest device over the mean of those with slots, `[B, L]`; 0 without any load."""
    return max_over_mean(tally.loads[:, :, tally.slots > 0], idle=0.0)


def mean_ratio(tally: Tally) -> Floats:
    """Busiest over mean, mean over the layers that are used, `[B]`."""
    ratio_BL = device_ratios(tally)
    return np.asarray(ratio_BL.sum(axis=1) / np.maximum((ratio_BL > 0).sum(axis=1), 1))


def dropped_share(sent_BLDE: NDArray[np.int32], rows_BL: Ints) -> float:
    """Share of routed pairs dropped, with buffers of `rows_BL` rows per expert and sending device."""
    return float(np.maximum(sent_BLDE - rows_BL[:, :, None, None], 0).sum() / sent_BLDE.sum())


def resampled_sums(values_UC: NDArray[np.number], *, seed: int) -> Floats:
    """Column sums over the rows, then over 1,000 resamplings of them, `[1 + R, C]`; of a single row the sums alone.

    Notes
    -----
    Draw r takes `rng.integers(U, size=U)`, the r-th such call on `numpy.random.default_rng(seed)`; figures computed
    from the same number of rows under the same seed are therefore paired. Cost: R U C multiplications.
    """
    values_UC = np.asarray(values_UC, np.float64)
    num_rows = len(values_UC)
    own_C: Floats = np.asarray(values_UC.sum(axis=0))
    if num_rows == 1:
        return own_C.reshape(1, -1)
    rng, sums = np.random.default_rng(seed), [own_C[None]]
    for first in range(0, DRAWS, BLOCK):
        block = min(BLOCK, DRAWS - first)
        times_RU = np.empty((block, num_rows))
        for times_U in times_RU:
            times_U[:] = np.bincount(rng.integers(num_rows, size=num_rows), minlength=num_rows)
        sums.append(np.asarray(times_RU @ values_UC, np.float64))
    return np.concatenate(sums)


def drawn(summands: Summands) -> bool:
    """Check whether a figure was resampled."""
    return any(levels_QR.shape[1] > 1 for levels_QR in summands.values())


def difference(ours: Summands, theirs: Summands) -> Summands:
    """Figure of the other less ours, by source and level; a source that one of them lacks adds nothing."""
    nothing = np.zeros((1, 1))
    return {source: theirs.get(source, nothing) - ours.get(source, nothing) for source in {**ours, **theirs}}


def interval(summands: Summands) -> tuple[float | None, float | None]:
    """The 2.5 % and 97.5 % quantiles of a resampled figure; None for both where it is undefined.

    Notes
    -----
    Fit errors are fully correlated within a source and independent between sources, hence, with one level per source,

        low  = 2.5 % quantile over the draws of   sum_s min_q summands[s][q]
        high = 97.5 % quantile over the draws of  sum_s max_q summands[s][q]

    A single unit, or step without any error of its curves, has no interval: nothing is known of its width.
    """
    drawn_QR = [levels_QR[:, 1:] if levels_QR.shape[1] > 1 else levels_QR for levels_QR in summands.values()]
    low_R, high_R = np.zeros(1), np.zeros(1)
    for levels_QR in drawn_QR:
        low_R, high_R = low_R + levels_QR.min(axis=0), high_R + levels_QR.max(axis=0)
    low_R, high_R = low_R[np.isfinite(low_R)], high_R[np.isfinite(high_R)]
    if not len(low_R) or (not drawn(summands) and low_R[0] == high_R[0]):
        return None, None
    return float(np.quantile(low_R, 0.025)), float(np.quantile(high_R, 0.975))
