"""The predicted seconds of a tally: every part of a step, by step.

Legend: B steps; L MoE layers; D devices.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ...profilers.fits.prediction import Prediction
from ...runtime.decisions import DispatchModel
from ...solvers.ports import link_classes
from ...solvers.seconds import (
    attention_seconds,
    exchange_seconds,
    expert_seconds,
    gather_seconds,
    no_seconds,
    slowest,
    step_seconds,
    total,
)
from ...traces.model import ModelSpec
from .speeds import Speeds
from .tally import Tally

__all__ = ["SOURCES", "STEP", "Predicted", "by_class", "predicted"]

STEP = "step_s"
SOURCES = {  # each part of a step, in order, to what errs as one: all curves of that kind
    "attention_s": "attention",
    "kv_s": "kv",
    "dispatch_s": "exchange",
    "experts_s": "experts",
    "combine_s": "exchange",
}
NEEDED = ("dispatch_s", "experts_s", "combine_s")  # of step_s; coherent needs kv_s, too


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of the parts of a step `[B]`, by metric name, and the share of calls outside the measured sizes.

    Parameters
    ----------
    crossed
        Where MoE layers are pipelined, hence no sum of their parts: their seconds in all passes under every pair of a
        level of the exchanges with one of the experts, `[Q Q, B]`, Q being low, middle and high.
    """

    seconds: dict[str, Prediction]
    extrapolated: dict[str, float]
    crossed: NDArray[np.float64] | None = None


def predicted(
    tally: Tally, speeds: Speeds, cluster: Cluster, model: ModelSpec, dispatch_model: DispatchModel
) -> Predicted:
    """The seconds of those parts that have a curve; `step_s`, and its sum, where none but attention lacks.

    Parameters
    ----------
    tally
        Loads and slots for the experts; in its ports, where it has some, the copies of dispatch and combine through
        every port, and the tokens and contexts where they attend. Under `migrating` a combine's copies end, and the
        next layer's tokens and contexts are, where `ports.combined_at` says: at the rank of each sample's next
        attention.

    Returns
    -------
    Predicted
        By metric and step: `attention_s`, `dispatch_s`, `experts_s`, `combine_s`, under `coherent` `kv_s`, what crosses
        links by class, too, where there are two (`dispatch_inter_s`, ...).
    """
    layers = _layers(tally, speeds, cluster, model, dispatch_model)
    seconds = {name: step_seconds(found, model.num_layers) for name, found in layers.items()}
    parts = [name for name in SOURCES if name in seconds]
    if {*NEEDED, *(["kv_s"] if dispatch_model == "coherent" else [])} <= set(parts):
        seconds[STEP] = total([seconds[name] for name in parts])
    outside = {name: float(layers[name].extrapolated.mean()) for name in parts}
    return Predicted(seconds, {name: share for name, share in outside.items() if share})


def _layers(
    tally: Tally, speeds: Speeds, cluster: Cluster, model: ModelSpec, dispatch_model: DispatchModel
) -> dict[str, Prediction]:
    """Seconds of the parts by layer, `[B, L]`."""
    ports, coherent = tally.ports, dispatch_model == "coherent"
    found: dict[str, Prediction] = {}
    if ports is None:
        return {"experts_s": expert_seconds(tally.loads, tally.slots, speeds.experts)} if speeds.experts else {}
    if speeds.attention:
        found["attention_s"] = attention_seconds(ports.tokens, ports.contexts, speeds.attention)
    if speeds.exchange and model.copy_bytes:
        dispatch = exchange_seconds(ports.dispatch, model.copy_bytes, speeds.exchange)
        combine = exchange_seconds(ports.combine, model.copy_bytes, speeds.exchange)
        if coherent and model.top_k == 1:  # the token is already where it lives next: nothing is called
            combine = [no_seconds(part.seconds.shape) for part in combine]
        found |= by_class("dispatch", dispatch, cluster) | by_class("combine", combine, cluster)
    if speeds.experts:
        found["experts_s"] = expert_seconds(tally.loads, tally.slots, speeds.experts)
    if coherent and speeds.gather:
        kv_bytes = float((model.attention.kv_size or 0) * (model.dtype_bytes or 0))
        group, classes = cluster.devices_per_node, link_classes(cluster)
        gather = gather_seconds(ports.tokens, kv_bytes, group, classes, speeds.gather)
        found |= by_class("kv", gather, cluster)
    return found


def by_class(name: str, seconds: list[Prediction], cluster: Cluster) -> dict[str, Prediction]:
    """A part that crosses links: `{name}_s`, the slowest class, and each class alone where there are two."""
    found = {f"{name}_s": slowest(seconds)}
    if len(seconds) > 1:
        found |= {f"{name}_{link}_s": part for link, part in zip(link_classes(cluster), seconds, strict=True)}
    return found
