"""The metrics of a plan, from a tally: values, intervals and paired gains.

=================  ==========================================================================================
hops_kept          share of first-choice transitions between MoE layers that stay on the device
node_hops_kept     the same for the node
device_copies      dispatch + combine copies to distinct remote devices, a token and layer
node_copies        the same for nodes
balance            busiest device's token-expert pairs over the mean of devices with slots, mean over layers and steps
balance_p95        95th percentile of the same
inter_bytes        bytes a step of the device copies that cross nodes: copies x hidden_size x dtype
intra_bytes        bytes a step of those that stay inside a node
kv_bytes           bytes of K and V that coherence gathers a step: (D - 1) x kv_size x dtype, a token and layer
dropped_share      token-expert pairs beyond a fixed capacity (`planner.measures.dropped`), of all that are routed
*_s                predicted seconds of a step and of its parts (`solvers.seconds`), mean over steps
=================  ==========================================================================================

Legend: U units; B steps; L MoE layers; D devices; M metrics of seconds; R bootstrap draws; S sources of seconds; Q
levels of a source's curves (low, middle, high).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...profilers.cluster import Cluster
from ...profilers.fits.prediction import Prediction
from ...runtime.decisions import DispatchModel
from ...runtime.plan import Metric
from ...traces.model import ModelSpec
from .intervals import interval, resampled_sums
from .predicted import SOURCES, STEP
from .tally import COUNTS, Tally

__all__ = ["Figures", "copies_metric", "figures", "max_over_mean"]


@dataclass(frozen=True, slots=True)
class Figures:
    """One contender's metrics with what their resampling gave, so that gains can be paired.

    Parameters
    ----------
    value
        Metric name to value.
    draws
        Metric name to its resampled values `[R]`; of seconds `[S, Q, R]`, one step with R = 1. Absent without an
        interval.
    """

    value: dict[str, float]
    draws: dict[str, NDArray[np.float64]]

    def metrics(self) -> dict[str, Metric]:
        """The metrics with their intervals."""
        return {name: self._metric(name) for name in self.value}

    def gain(self, metric: str, against: "Figures") -> Metric:
        """How much less of `metric` there is than in `against`, paired draw by draw; one step gives no interval."""
        if metric not in self.value or metric not in against.value:
            raise InputError(f"no {metric} to judge by: no step of the judged samples routes a token")
        paired = metric in self.draws and metric in against.draws and self.draws[metric].shape[-1] > 1
        low, high = interval(against.draws[metric] - self.draws[metric]) if paired else (None, None)
        return Metric(value=against.value[metric] - self.value[metric], low=low, high=high)

    def step_compares(self, against: "Figures", *, alike: bool) -> bool:
        """Whether `step_s` is there in both and of the same parts and passes.

        Parameters
        ----------
        alike
            Whether both have one dispatch model, hence their tokens in the same places for attention: it may then be
            left out of both. Else it is what they differ in.
        """
        whole = [STEP in one.value for one in (self, against)]
        timed = ["attention_s" in one.value for one in (self, against)]
        backward = ["moe_backward_s" in one.value for one in (self, against)]
        return all(whole) and backward[0] == backward[1] and (all(timed) or (alike and not any(timed)))

    @classmethod
    def weighted(cls, parts: Sequence[tuple[float, Self]]) -> Self:
        """The weighted means, figure by figure and draw by draw, of those that all parts have."""
        names = set.intersection(*({*one.value} for _, one in parts))
        drawn = set.intersection(names, *({*one.draws} for _, one in parts))
        first = parts[0][1]
        return cls(
            {name: sum(weight * one.value[name] for weight, one in parts) for name in first.value if name in names},
            {
                name: np.sum([weight * one.draws[name] for weight, one in parts], axis=0)
                for name in first.draws
                if name in drawn
            },
        )

    def _metric(self, name: str) -> Metric:
        low, high = interval(self.draws[name]) if name in self.draws else (None, None)
        return Metric(value=self.value[name], low=low, high=high)


def figures(
    tally: Tally,
    model: ModelSpec,
    *,
    coherent: bool,
    tokens_per_step: float,
    seed: int,
    seconds: Mapping[str, Prediction] = MappingProxyType({}),
    crossed: NDArray[np.float64] | None = None,
    dropped_share: float | None = None,
) -> Figures:
    """All metrics of a tally; those that need an unknown size of the model are left out.

    Parameters
    ----------
    seconds
        By metric, of every step `[B]`.
    crossed
        As `Predicted.crossed`.
    dropped_share
        None without a fixed capacity.
    """
    value, draws = _copies(tally, model, tokens_per_step, seed) if tally.counts.shape[1] else ({}, {})
    cell_bytes = tokens_per_step * model.num_layers * (model.dtype_bytes or 0)
    if coherent and model.attention.kv_size and model.dtype_bytes:
        value["kv_bytes"] = cell_bytes * model.attention.kv_size * (tally.loads.shape[2] - 1)
    _add_balance(tally.loads[:, :, tally.slots > 0], seed, value, draws)
    _add_seconds(seconds, crossed, seed, value, draws)
    if dropped_share is not None:
        value["dropped_share"] = dropped_share
    return Figures(value, draws)


def copies_metric(dispatch_model: DispatchModel, cluster: Cluster) -> str:
    """Which copies say what a placement saves: where tokens return home to several nodes, those to nodes.

    Engines for such clusters (DeepEP) send a token once to each node; inside nodes links are several times faster.
    """
    return "node_copies" if dispatch_model == "standard" and cluster.num_nodes > 1 else "device_copies"


def _copies(
    tally: Tally, model: ModelSpec, tokens_per_step: float, seed: int
) -> tuple[dict[str, float], dict[str, NDArray[np.float64]]]:
    """Shares, copies and their bytes, with their draws."""
    value = {name: float(x[0]) for name, x in _ratios(tally.counts.sum(axis=0)[None], model.num_layers).items()}
    draws = _ratios(resampled_sums(tally.counts, seed=seed), model.num_layers)
    far, far_R = value.pop("far_copies"), draws.pop("far_copies")
    if model.copy_bytes:
        copy_bytes = tokens_per_step * model.num_layers * model.copy_bytes
        value |= {"inter_bytes": copy_bytes * far, "intra_bytes": copy_bytes * (value["device_copies"] - far)}
        draws |= {"inter_bytes": copy_bytes * far_R, "intra_bytes": copy_bytes * (draws["device_copies"] - far_R)}
    return value, draws


def _ratios(sums_RC: NDArray[np.number], num_layers: int) -> dict[str, NDArray[np.float64]]:
    """Shares and copies from summed counts, each `[R]`."""
    sums = dict(zip(COUNTS, sums_RC.T.astype(np.float64), strict=True))
    cells_R = sums["tokens"] * num_layers
    ratios = {name: sums[name] / cells_R for name in ("device_copies", "node_copies", "far_copies")}
    if sums["hops"].any():
        with np.errstate(invalid="ignore"):
            ratios |= {name: sums[name] / sums["hops"] for name in ("hops_kept", "node_hops_kept")}
    return ratios


def max_over_mean(loads: NDArray[Any]) -> NDArray[np.float64]:
    """The busiest device over the mean in every step and layer `[B, L]`, of loads `[B, L, D]`; 0 without any."""
    mean_BL = loads.mean(axis=2)
    found: NDArray[np.float64] = np.divide(loads.max(axis=2), mean_BL, where=mean_BL > 0, out=np.zeros_like(mean_BL))
    return found


def _add_balance(
    loads_BLD: NDArray[Any], seed: int, value: dict[str, float], draws: dict[str, NDArray[np.float64]]
) -> None:
    balance_BL = max_over_mean(loads_BLD)
    busy_BL = balance_BL > 0
    if not busy_BL.any():
        return
    value["balance"] = float(balance_BL[busy_BL].mean())
    value["balance_p95"] = float(np.quantile(balance_BL[busy_BL], 0.95))
    if len(loads_BLD) > 1:
        sums_R2 = resampled_sums(np.stack([balance_BL.sum(axis=1), busy_BL.sum(axis=1)], axis=1), seed=seed)
        with np.errstate(invalid="ignore"):
            draws["balance"] = sums_R2[:, 0] / sums_R2[:, 1]


def _add_seconds(
    seconds: Mapping[str, Prediction],
    crossed_QB: NDArray[np.float64] | None,
    seed: int,
    value: dict[str, float],
    draws: dict[str, NDArray[np.float64]],
) -> None:
    if not seconds:
        return
    levels_BMQ = np.stack([np.stack([part.low, part.seconds, part.high], axis=1) for part in seconds.values()], axis=1)
    value |= dict(zip(seconds, levels_BMQ[:, :, 1].mean(axis=0).tolist(), strict=True))
    means = dict(zip(seconds, _resampled_means(levels_BMQ, seed), strict=True))
    draws |= {name: mean_QR[None] for name, mean_QR in means.items()}
    if crossed_QB is not None:
        draws[STEP] = _pipelined(means, _resampled_means(crossed_QB.T[:, None], seed)[0])
    elif STEP in means:
        draws[STEP] = _by_source(means)


def _resampled_means(levels_BMQ: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Means over steps, `[M, Q, R]`; of a single step itself, R = 1."""
    num_steps, *shape = levels_BMQ.shape
    if num_steps == 1:
        return levels_BMQ.transpose(1, 2, 0)
    sums_RC = resampled_sums(levels_BMQ.reshape(num_steps, -1), seed=seed)
    means_MQR: NDArray[np.float64] = (sums_RC / num_steps).T.reshape(*shape, -1)
    return means_MQR


def _by_source(means: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """What each source has part in a step, `[S, Q, R]`; nothing where a step does without it."""
    names = sorted(set(SOURCES.values()))
    found_SQR = np.zeros((len(names), *means[STEP].shape))
    for part, source in SOURCES.items():
        if part in means:
            found_SQR[names.index(source)] += means[part]
    return found_SQR


def _pipelined(means: Mapping[str, NDArray[np.float64]], crossed_QR: NDArray[np.float64]) -> NDArray[np.float64]:
    """What attention has part in a step, and the pipelined layers: any levels of their two sources are one level."""
    nothing_QR = np.zeros((1, crossed_QR.shape[1]))
    attention_QR = means.get("attention_s", nothing_QR)
    return np.stack([np.repeat(attention_QR, len(crossed_QR) // len(attention_QR), axis=0), crossed_QR])
