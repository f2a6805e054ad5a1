"""The metrics of a contender: one row each says what it is, how it is shown, and how it follows from a tally.

`METRICS` is the only place that names a metric: evaluation, certification, tables, legends, JSON and `docs/metrics.md`
loop over it.

Legend: U units (samples) or, where samples are re-homed, steps; B steps; L MoE layers; D devices; R the part itself and
its bootstrap draws; Q levels of a source's curves (low, middle, high).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...profilers.cluster import Cluster
from ...runtime.decisions import DispatchModel
from ...runtime.plan import Metric
from ...traces.model import ModelSpec
from .intervals import Summands, difference, drawn, interval, resampled_sums
from .price import STEP, Seconds
from .tally import COUNTS, Tally

__all__ = [
    "METRICS",
    "Context",
    "Figures",
    "MetricSpec",
    "Sums",
    "copies_metric",
    "dropped_share",
    "figures_of",
    "max_over_mean",
]

Draws = NDArray[np.float64]  # [R]
Unit = Literal["count", "share", "ratio", "bytes", "seconds"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """A metric.

    Parameters
    ----------
    column
        Its header in a table; empty: not a column of its own.
    noun
        What there is more or less of, in a sentence.
    meaning
        One sentence for legends and docs.
    unit
        What its figures are; says how they are shown.
    better
        Whether less or more of it is better.
    per
        What its interval resamples.
    needs
        What must be known for it.
    compute
        Its summands; None where the contender lacks what it needs.
    headline
        Whether it is a column of the first table; those of a higher rank come first, None: it is not.
    """

    name: str
    column: str
    noun: str
    meaning: str
    unit: Unit
    per: Literal["sample", "step", "nothing"]
    needs: str
    compute: Callable[[Sums, Context], Summands | None]
    better: Literal["less", "more"] = "less"
    headline: int | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """One contender's metrics with what their resampling gave, so that gains can be paired, by metric name."""

    summands: Mapping[str, Summands]

    @property
    def value(self) -> dict[str, float]:
        """The metrics on the part itself."""
        return {name: _middle(summands) for name, summands in self.summands.items()}

    def metrics(self) -> dict[str, Metric]:
        """The metrics with their intervals."""
        return {name: _metric(summands) for name, summands in self.summands.items()}

    def gain(self, metric: str, against: "Figures") -> Metric:
        """How much less of `metric` there is than in `against`, paired draw by draw; one step gives no interval."""
        if metric not in self.summands or metric not in against.summands:
            raise InputError(
                f"no {metric} to judge by: it needs {METRICS[metric].needs}, and steps that route tokens; give what"
                " lacks, or record more"
            )
        ours, theirs = self.summands[metric], against.summands[metric]
        less = difference(ours, theirs)
        low, high = interval(less) if drawn(ours) and drawn(theirs) else (None, None)
        return Metric(value=_middle(theirs) - _middle(ours), low=low, high=high)

    def step_compares(self, against: "Figures", *, alike: bool) -> bool:
        """Whether `step_s` is there in both and of the same parts and passes.

        Parameters
        ----------
        alike
            Whether both have one dispatch model, hence their tokens in the same places for attention: it may then be
            left out of both. Else it is what they differ in.
        """
        whole, timed, backward = (
            [name in one.summands for one in (self, against)] for name in (STEP, "attention_s", "moe_backward_s")
        )
        return all(whole) and backward[0] == backward[1] and (all(timed) or (alike and not any(timed)))

    @classmethod
    def weighted(cls, parts: Sequence[tuple[float, Self]]) -> Self:
        """The weighted means, figure by figure and draw by draw, of those that all parts have."""
        first = parts[0][1].summands
        return cls(
            {
                name: {
                    source: np.asarray(sum(weight * one.summands[name][source] for weight, one in parts))
                    for source in first[name]
                }
                for name in first
                if all(name in one.summands for _, one in parts)
            }
        )


def figures_of(contexts: Sequence[Context], *, seed: int) -> list[Figures]:
    """All metrics of contenders on one part; those that need an unknown size of the model are left out.

    One product with the draws over units and one with those over steps serve all contenders.
    """
    return [
        Figures(
            {name: summands for name, spec in METRICS.items() if (summands := spec.compute(sums, context)) is not None}
        )
        for sums, context in zip(_summed(contexts, seed), contexts, strict=True)
    ]


def copies_metric(dispatch_model: DispatchModel, cluster: Cluster) -> str:
    """Which copies say what a placement saves: where tokens return home to several nodes, those to nodes.

    Engines for such clusters (DeepEP) send a token once to each node; inside nodes links are several times faster.
    """
    return "node_copies" if dispatch_model == "standard" and cluster.num_nodes > 1 else "device_copies"


def max_over_mean(loads: NDArray[Any]) -> NDArray[np.float64]:
    """The busiest device over the mean in every step and layer `[B, L]`, of loads `[B, L, D]`; 0 without any."""
    mean_BL = loads.mean(axis=2)
    return np.asarray(np.divide(loads.max(axis=2), mean_BL, where=mean_BL > 0, out=np.zeros_like(mean_BL)))


def dropped_share(sent_BLDE: NDArray[np.int32], rows_BL: NDArray[np.int64]) -> float:
    """Share of routed pairs dropped, with buffers of `rows_BL` rows per expert and sending device."""
    return float(np.maximum(sent_BLDE - rows_BL[:, :, None, None], 0).sum() / sent_BLDE.sum())


def _ratios(tally: Tally) -> NDArray[np.float64]:
    return max_over_mean(tally.loads[:, :, tally.slots > 0])


def _summed(contexts: Sequence[Context], seed: int) -> list[Sums]:
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
    ratio_BL = _ratios(context.tally)
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


def _middle(summands: Summands) -> float:
    return float(sum(levels_QR[len(levels_QR) // 2, 0] for levels_QR in summands.values()))


def _metric(summands: Summands) -> Metric:
    low, high = interval(summands)
    return Metric(value=_middle(summands), low=low, high=high)


def _of(figure: Draws | float | None) -> Summands | None:
    """The summands of a figure without errors of curves."""
    return None if figure is None else {"": np.atleast_2d(np.asarray(figure, np.float64))}


def _share_of_hops(name: str) -> Callable[[Sums, Context], Summands | None]:
    def compute(sums: Sums, context: Context) -> Summands | None:
        if not sums.counts or not sums.counts["hops"].any():
            return None
        with np.errstate(invalid="ignore"):
            return _of(sums.counts[name] / sums.counts["hops"])

    return compute


def _copies(sums: Sums, context: Context, name: str) -> Draws | None:
    """Copies per token and layer, `[R]`."""
    return sums.counts[name] / (sums.counts["tokens"] * context.model.num_layers) if sums.counts else None


def _bytes(figure: Draws | None, context: Context) -> Summands | None:
    each = context.copies_to_bytes
    return _of(None if figure is None or not each else each * figure)


def _near(sums: Sums, context: Context) -> Draws | None:
    copies, far = _copies(sums, context, "device_copies"), _copies(sums, context, "far_copies")
    return None if copies is None or far is None else copies - far


def _kv_bytes(sums: Sums, context: Context) -> Summands | None:
    model, others = context.model, context.tally.loads.shape[2] - 1
    if context.dispatch_model != "coherent" or not sums.counts or not (model.attention.kv_size and model.dtype_bytes):
        return None
    return _of(context.tokens_per_step * model.num_layers * model.attention.kv_size * model.dtype_bytes * others)


def _balance(sums: Sums, context: Context) -> Summands | None:
    if not sums.busy[0]:
        return None
    with np.errstate(invalid="ignore"):
        return _of(sums.balance / sums.busy)


def _balance_p95(sums: Sums, context: Context) -> Summands | None:
    ratio_BL = _ratios(context.tally)
    return _of(float(np.quantile(ratio_BL[ratio_BL > 0], 0.95))) if sums.busy[0] else None


def _seconds(name: str) -> Callable[[Sums, Context], Summands | None]:
    def compute(sums: Sums, context: Context) -> Summands | None:
        return {"": sums.seconds[name]} if name in sums.seconds else None

    return compute


def _exchange_s(sums: Sums, context: Context) -> Summands | None:
    parts = [sums.seconds[name] for name in ("dispatch_s", "combine_s") if name in sums.seconds]
    return {"": np.asarray(sum(parts))} if parts else None


PLACED, SIZED, TIMED = "a trace of tokens", "a trace of tokens, and the model's sizes", "a profile or links"
PARTS = {  # of a step: its column, and what of it is timed
    "attention_s": ("attention", "attention of the busiest device"),
    "kv_s": ("K/V", "gathering K and V on every device"),
    "dispatch_s": ("dispatch", "the busiest port's dispatch"),
    "experts_s": ("experts", "the busiest device's experts"),
    "combine_s": ("combine", "the busiest port's combine"),
}


def _rows() -> Iterable[MetricSpec]:
    yield MetricSpec(
        name="device_copies",
        column="copies/token",
        noun="copies",
        meaning="hidden vectors sent to other devices, dispatch and combine, per token and layer",
        unit="count",
        per="sample",
        needs=PLACED,
        compute=lambda sums, context: _of(_copies(sums, context, "device_copies")),
        headline=8,
    )
    yield MetricSpec(
        name="node_copies",
        column="to nodes",
        noun="copies to other nodes",
        meaning="hidden vectors sent to other nodes, one per node, per token and layer",
        unit="count",
        per="sample",
        needs=PLACED,
        compute=lambda sums, context: _of(_copies(sums, context, "node_copies")),
        headline=7,
    )
    yield MetricSpec(
        name="hops_kept",
        column="hops kept",
        noun="hops kept on the device",
        meaning="share of first-choice transitions between MoE layers that stay on the device",
        unit="share",
        per="sample",
        needs=PLACED,
        compute=_share_of_hops("hops_kept"),
        better="more",
        headline=4,
    )
    yield MetricSpec(
        name="node_hops_kept",
        column="on node",
        noun="hops kept on the node",
        meaning="share of first-choice transitions between MoE layers that stay on the node",
        unit="share",
        per="sample",
        needs=PLACED,
        compute=_share_of_hops("node_hops_kept"),
        better="more",
    )
    yield MetricSpec(
        name="balance",
        column="balance (p95)",
        noun="load on the busiest device",
        meaning="busiest device's token-expert pairs over the mean of devices with slots, mean over layers and steps",
        unit="ratio",
        per="step",
        needs="any trace",
        compute=_balance,
        headline=9,
    )
    yield MetricSpec(
        name="balance_p95",
        column="",
        noun="load on the busiest device",
        meaning="95th percentile, over layers and steps, of the busiest device's load over the mean",
        unit="ratio",
        per="nothing",
        needs="any trace",
        compute=_balance_p95,
    )
    yield MetricSpec(
        name="inter_bytes",
        column="MB between nodes",
        noun="bytes between nodes",
        meaning="bytes per step of the copies that cross nodes",
        unit="bytes",
        per="sample",
        needs=SIZED,
        compute=lambda sums, context: _bytes(_copies(sums, context, "far_copies"), context),
        headline=6,
    )
    yield MetricSpec(
        name="intra_bytes",
        column="MB inside nodes",
        noun="bytes inside nodes",
        meaning="bytes per step of the copies that stay inside a node",
        unit="bytes",
        per="sample",
        needs=SIZED,
        compute=lambda sums, context: _bytes(_near(sums, context), context),
    )
    yield MetricSpec(
        name="kv_bytes",
        column="MB of K and V",
        noun="bytes of K and V",
        meaning="bytes per step of K and V that coherence gathers on every device",
        unit="bytes",
        per="nothing",
        needs=SIZED,
        compute=_kv_bytes,
        headline=5,
    )
    yield MetricSpec(
        name="samples_moved",
        column="moved",
        noun="samples moved",
        meaning="share of samples that change their device in a combine, mean over layers",
        unit="share",
        per="step",
        needs="a trace of samples",
        compute=lambda sums, context: _of(sums.moved),
        headline=3,
    )
    yield MetricSpec(
        name="dropped_share",
        column="dropped",
        noun="pairs dropped",
        meaning="share of token-expert pairs beyond a fixed capacity",
        unit="share",
        per="nothing",
        needs=PLACED,
        compute=lambda sums, context: _of(context.dropped_share),
        headline=10,
    )
    for name, (column, meaning) in PARTS.items():
        yield _timed(name, column, f"seconds per step: {meaning}", _seconds(name))
        for link, where in (("intra", "inside nodes"), ("inter", "between nodes")):
            part = f"{name.removesuffix('_s')}_{link}_s"
            if name in ("kv_s", "dispatch_s", "combine_s"):
                yield _timed(part, f"{column} {link}", f"of {name}, what crosses {where}", _seconds(part))
    yield _timed("exchange_s", "exchange", "seconds per step: dispatch and combine together", _exchange_s, headline=2)
    yield _timed(
        "moe_s", "MoE", "seconds per step: the forward pass of MoE layers whose exchanges and experts overlap",
        _seconds("moe_s"), headline=1,
    )  # fmt: skip
    yield _timed("moe_backward_s", "backward", "the same of the backward pass", _seconds("moe_backward_s"))
    yield _timed(STEP, "step", "seconds per step: all its parts", lambda sums, context: sums.step or None, headline=11)


def _timed(
    name: str,
    column: str,
    meaning: str,
    compute: Callable[[Sums, Context], Summands | None],
    headline: int | None = None,
) -> MetricSpec:
    """A metric of seconds."""
    return MetricSpec(
        name=name,
        column=column,
        noun=f"time per {'step' if name == STEP else f'step for {column}'}",
        meaning=meaning,
        unit="seconds",
        per="step",
        needs=TIMED,
        compute=compute,
        headline=headline,
    )


METRICS: dict[str, MetricSpec] = {spec.name: spec for spec in _rows()}
