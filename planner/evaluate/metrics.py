"""Metrics of a contender, a row each: its meaning, its form on screen, and its formula.

`METRICS` is the only place that names a metric: evaluation, certification, tables, legends, JSON and `docs/metrics.md`
loop over it.

Legend: R the part itself and its bootstrap draws; Q levels of a source's curves (low, middle, high).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self

import numpy as np

from ...errors import InputError
from ...profilers.cluster import Cluster
from ...runtime.decisions import DispatchModel
from ...runtime.plan import Metric
from ...runtime.wire import copy_bytes
from ...solvers.arrays import Floats
from .costs import CostModel
from .price import IDEAL, STEP
from .sums import Context, Draws, Summands, Sums, device_ratios, difference, drawn, interval, summed

# Metrics that code asks for by name; everything else loops over METRICS.
COPIES: Final = "device_copies"
NODE_COPIES: Final = "node_copies"
BALANCE: Final = "balance"
TAIL: Final = "balance_p95"
FAR_BYTES: Final = "inter_bytes"
NEAR_BYTES: Final = "intra_bytes"
KV_BYTES: Final = "kv_bytes"
MOVED: Final = "samples_moved"
DROPPED: Final = "dropped_share"
MIGRATED: Final = "bytes_migrated"
ATTENTION: Final = "attention_s"
KV: Final = "kv_s"
DISPATCH: Final = "dispatch_s"
EXPERTS: Final = "experts_s"
COMBINE: Final = "combine_s"
EXCHANGE: Final = "exchange_s"
AROUND: Final = "attention_exchange_s"
COUNTS: Final = "counts_s"
HOME: Final = "home_s"
TimedMetric = Literal["step_s", "experts_s"]
Currency = TimedMetric | Literal["balance"]  # what candidates of any kind are compared by

Compute = Callable[[Sums, Context], Summands | Floats | float | None]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric."""

    name: str
    column: str  #: Its header in a table; empty: not a column of its own
    noun: str  #: What there is more or less of, in a sentence
    unit: Literal["count", "share", "ratio", "bytes", "seconds"]  #: What its figures are; says how they are shown
    per: Literal["sample", "step", "nothing"]  #: What its interval resamples
    needs: str  #: What must be known for it
    #: Its summands, or a figure without errors of curves, `[R]` or one; None where the contender lacks what it needs
    compute: Compute
    meaning: str  #: One sentence for legends and docs
    better: Literal["less", "more"] = "less"  #: Whether less or more of it is better
    #: Rank among the columns of the first table, the highest first; None: not in it
    headline: int | None = None
    tail: str | None = None  #: The metric in brackets beside it in a table


@dataclass(frozen=True, slots=True)
class Figures:
    """Metrics of a contender by name, with their resampled values, so that gains can be paired."""

    summands: Mapping[str, Summands]

    @property
    def value(self) -> dict[str, float]:
        """The metrics on the part itself."""
        return {name: _middle(summands) for name, summands in self.summands.items()}

    def metrics(self) -> dict[str, Metric]:
        """The metrics with their intervals."""
        return {name: metric_of(summands) for name, summands in self.summands.items()}

    def gain(self, metric: str, against: "Figures") -> Metric:
        """Gain over `against`: how much less of `metric` there is, paired draw by draw; one step gives no interval."""
        if metric not in self.summands or metric not in against.summands:
            raise InputError(
                f"{METRICS[metric].noun} is not known here: it needs {METRICS[metric].needs}, and steps that route"
                " tokens; give --profile, or record more"
            )
        ours, theirs = self.summands[metric], against.summands[metric]
        less = difference(ours, theirs)
        low, high = interval(less) if drawn(ours) and drawn(theirs) else (None, None)
        return Metric(value=_middle(theirs) - _middle(ours), low=low, high=high)

    def share(self, metric: str, against: "Figures") -> Metric | None:
        """Gain over `against` as a share of its value; None where that is 0.

        Notes
        -----
        The interval is that of the ratio itself, under all levels of the sources, each the same in both figures.
        """
        ours, theirs = self.summands[metric], against.summands[metric]
        if not _middle(theirs):
            return None
        levels = {source: len(rows_QR) for one in (ours, theirs) for source, rows_QR in one.items()}
        shares = []
        for chosen in itertools.product(*map(range, levels.values())):
            level = dict(zip(levels, chosen, strict=True))
            left_R, base_R = (sum(rows_QR[level[source]] for source, rows_QR in one.items()) for one in (ours, theirs))
            with np.errstate(divide="ignore", invalid="ignore"):  # a draw may hold nothing
                shares.append(1 - left_R / base_R)
        low, high = interval({"": np.stack(shares)}) if drawn(ours) and drawn(theirs) else (None, None)
        return Metric(value=1 - _middle(ours) / _middle(theirs), low=low, high=high)

    def step_compares(self, against: "Figures") -> bool:
        """Check whether `step_s` is known of both, and of the same passes."""
        whole, backward = ([name in one.summands for one in (self, against)] for name in (STEP, "moe_backward_s"))
        return all(whole) and backward[0] == backward[1]

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
    """All metrics of contenders on one part; those that need tokens, or a size of the model, not known are left out.

    One product with the draws over units and one with those over steps serve all contenders.
    """
    figures = []
    for sums, context in zip(summed(contexts, seed), contexts, strict=True):
        known = [spec for spec in METRICS.values() if sums.counts or spec.needs not in (PLACED, SIZED)]
        with np.errstate(invalid="ignore"):  # a draw may hold nothing of what a figure is a share of
            computed = {spec.name: spec.compute(sums, context) for spec in known}
        figures.append(Figures({name: _summands(one) for name, one in computed.items() if one is not None}))
    return figures


def is_timed(name: str) -> bool:
    """Check whether a metric is of seconds, as all unknown ones are taken to be."""
    return name not in METRICS or METRICS[name].unit == "seconds"


def copies_metric(dispatch_model: DispatchModel, cluster: Cluster) -> str:
    """The copies that a placement saves: to nodes where tokens return home to several nodes, else to devices.

    Engines for such clusters (DeepEP) send a token once to each node; inside nodes links are several times faster.
    """
    return NODE_COPIES if dispatch_model == "standard" and cluster.num_nodes > 1 else COPIES


def load_metric(costs: CostModel | None) -> Literal["experts_s", "balance"]:
    """Metric of the busiest device: seconds of its experts, which hold the cost of weights, else its load."""
    return EXPERTS if costs is not None and costs.experts else BALANCE


def metric_of(summands: Summands) -> Metric:
    """A figure with its interval."""
    low, high = interval(summands)
    return Metric(value=_middle(summands), low=low, high=high)


def _middle(summands: Summands) -> float:
    return float(sum(levels_QR[len(levels_QR) // 2, 0] for levels_QR in summands.values()))


def _summands(figure: Summands | Floats | float) -> Summands:
    return figure if isinstance(figure, Mapping) else {"": np.atleast_2d(np.asarray(figure, np.float64))}


def _per_token(sums: Sums, context: Context, name: str) -> Draws:
    """Copies per token and layer, `[R]`."""
    return sums.counts[name] / (sums.counts["tokens"] * context.model.num_layers)


def _copies(name: str) -> Compute:
    return lambda sums, context: _per_token(sums, context, name)


def _hops(name: str) -> Compute:
    """Share of transitions that are kept."""
    return lambda sums, _: sums.counts[name] / sums.counts["hops"] if sums.counts["hops"].any() else None


def _bytes(name: str, *less: str) -> Compute:
    """Bytes per step of copies, without another kind of copies; None where the model's sizes are unknown."""

    def compute(sums: Sums, context: Context) -> Draws | None:
        each = context.tokens_per_step * context.model.num_layers * (copy_bytes(context.model, context.wire) or 0)
        copies_R = _per_token(sums, context, name) - sum(_per_token(sums, context, other) for other in less)
        return each * copies_R if each else None

    return compute


def _kv_bytes(_: Sums, context: Context) -> float | None:
    model, others = context.model, len(context.tally.slots) - 1
    if context.dispatch_model != "coherent" or not (model.attention.kv_size and model.dtype_bytes):
        return None
    return context.tokens_per_step * model.num_layers * model.attention.kv_size * model.dtype_bytes * others


def _bytes_migrated(_: Sums, context: Context) -> float | None:
    moves, each = context.tally.moves, context.model.expert_state_bytes
    if moves is None or each is None:
        return None
    sent_B = moves[:, :, :, 0].sum(axis=(1, 2, 3))
    return float(sent_B.mean()) / context.record_steps * each


def _balance(sums: Sums, _: Context) -> Draws | None:
    return sums.balance / sums.busy if sums.busy[0] else None


def _balance_p95(sums: Sums, context: Context) -> float | None:
    ratio_BL = device_ratios(context.tally)
    return float(np.quantile(ratio_BL[ratio_BL > 0], 0.95)) if sums.busy[0] else None


def _seconds(*names: str) -> Compute:
    """Seconds of these parts together, those that are timed; None where none is."""

    def compute(sums: Sums, _: Context) -> Floats | None:
        parts = [sums.seconds[name] for name in names if name in sums.seconds]
        return np.asarray(sum(parts)) if parts else None

    return compute


def _around(sums: Sums, _: Context) -> Summands | None:
    """Seconds of attention, dispatch and combine; None unless all are timed."""
    if not {ATTENTION, DISPATCH, COMBINE} <= sums.seconds.keys():
        return None
    return {"attention": sums.seconds[ATTENTION], "exchange": sums.seconds[DISPATCH] + sums.seconds[COMBINE]}


def _timed(
    name: str, column: str, meaning: str, compute: Compute | None = None, headline: int | None = None
) -> MetricSpec:
    """A metric of seconds: the field of that name, unless `compute` is given."""
    noun = "time per step" if name == STEP else f"{column} time per step"
    computed = compute or _seconds(name)
    return MetricSpec(name, column, noun, "seconds", "step", TIMED, computed, meaning, headline=headline)


ANY, PLACED, SAMPLES = "any trace", "a trace of tokens", "a trace of samples"
SIZED, TIMED = "a trace of tokens, and the model's sizes", "a profile or links"
TRAINED = "replicas that follow the load, and the model's sizes"

# fmt: off
ROWS = (
    # name, column, noun, unit, what its interval resamples, what it needs, how it is computed, its meaning
    MetricSpec(COPIES, "copies/token", "copies", "count", "sample", PLACED, _copies(COPIES),
        "hidden vectors sent to other devices, dispatch and combine, per token and layer", headline=8),
    MetricSpec(NODE_COPIES, "to nodes", "copies to other nodes", "count", "sample", PLACED, _copies(NODE_COPIES),
        "hidden vectors sent to other nodes, one per node, per token and layer", headline=7),
    MetricSpec("hops_kept", "hops kept", "hops kept on the device", "share", "sample", PLACED, _hops("hops_kept"),
        "share of tokens whose first expert in the next MoE layer is on the same device", better="more", headline=4),
    MetricSpec("node_hops_kept", "on node", "hops kept on the node", "share", "sample", PLACED, _hops("node_hops_kept"),
        "share of tokens whose first expert in the next MoE layer is on the same node", better="more"),
    MetricSpec(BALANCE, "balance (p95)", "load on the busiest device", "ratio", "step", ANY, _balance,
        "busiest device's token-expert pairs over the mean of devices with slots, mean over layers and steps",
        headline=9, tail=TAIL),
    MetricSpec(TAIL, "", "load on the busiest device", "ratio", "nothing", ANY, _balance_p95,
        "95th percentile, over layers and steps, of the busiest device's load over the mean"),
    MetricSpec(FAR_BYTES, "MB between nodes", "bytes between nodes", "bytes", "sample", SIZED, _bytes("far_copies"),
        "bytes per step of the copies that cross nodes", headline=6),
    MetricSpec(NEAR_BYTES, "MB inside nodes", "bytes inside nodes", "bytes", "sample", SIZED,
        _bytes(COPIES, "far_copies"), "bytes per step of the copies that stay inside a node"),
    MetricSpec(KV_BYTES, "MB of K and V", "bytes of K and V", "bytes", "nothing", SIZED, _kv_bytes,
        "bytes per step of K and V that coherence gathers on every device", headline=5),
    MetricSpec(MOVED, "moved", "samples moved", "share", "step", SAMPLES, lambda sums, _: sums.moved,
        "share of samples that change their device in a combine, mean over layers", headline=3),
    MetricSpec(DROPPED, "dropped", "pairs dropped", "share", "nothing", PLACED,
        lambda _, context: context.dropped_share,
        "share of token-expert pairs beyond a fixed capacity", headline=10),
    MetricSpec(MIGRATED, "MB moved/step", "bytes moved", "bytes", "nothing", TRAINED, _bytes_migrated,
        "bytes per step of experts that change their owner, with their optimizer state"),
    _timed(ATTENTION, "attention", "seconds per step: attention of the busiest device"),
    _timed(KV, "K/V", "seconds per step: gathering K and V on every device"),
    _timed("kv_intra_s", "K/V intra", "of kv_s, what crosses inside nodes"),
    _timed("kv_inter_s", "K/V inter", "of kv_s, what crosses between nodes"),
    _timed(COUNTS, "counts", "seconds per step: telling all devices what each holds, before a layer"),
    _timed("folding_s", "folding", "seconds per step: finding rows that stand for others, folding them, both passes"),
    _timed(DISPATCH, "dispatch", "seconds per step: the busiest port's dispatch"),
    _timed("dispatch_intra_s", "dispatch intra", "of dispatch_s, what crosses inside nodes"),
    _timed("dispatch_inter_s", "dispatch inter", "of dispatch_s, what crosses between nodes"),
    _timed(EXPERTS, "experts", "seconds per step: the busiest device's experts"),
    _timed(COMBINE, "combine", "seconds per step: the busiest port's combine"),
    _timed("combine_intra_s", "combine intra", "of combine_s, what crosses inside nodes"),
    _timed("combine_inter_s", "combine inter", "of combine_s, what crosses between nodes"),
    _timed(EXCHANGE, "exchange", "seconds per step: dispatch and combine together",
        _seconds(DISPATCH, COMBINE), headline=2),
    _timed(AROUND, "attention + exchange", "seconds per step: attention, dispatch and combine together", _around),
    _timed(HOME, "way home", "seconds per step: hidden vectors on their way home after the last layer"),
    _timed("sums_s", "gradient sums", "seconds per step: summing the gradients of replicas, and sending weights"),
    _timed("moves_s", "moves", "seconds per step: experts that change their owner, with their optimizer state"),
    _timed("moe_s", "MoE", "seconds per step: the forward pass of MoE layers whose exchanges and experts overlap",
        headline=1),
    _timed("moe_backward_s", "backward", "the same of the backward pass"),
    _timed(IDEAL, "even loads", "seconds per step if a row's devices and ports had the mean load, in whole layers"),
    _timed(STEP, "step", "seconds per step: all its parts", lambda sums, _: sums.step or None, headline=11),
)
# fmt: on

METRICS: dict[str, MetricSpec] = {spec.name: spec for spec in ROWS}
