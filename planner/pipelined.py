"""The predicted seconds of a tally whose MoE layers are pipelined.

A chunk is an equal share of every device's tokens, in whole tokens, so the busiest port and the busiest device of a
layer stay so in each of its chunks, and decide how long that takes. Seconds add up to `step_s` by pass, no longer by
part: `dispatch_s`, `experts_s` and `combine_s` are how long a stage is busy, and stages overlap.

    step_s = attention_s + moe_s + moe_backward_s                                                               (1)

Legend: B steps; L MoE layers; R degrees; Q levels of a source's curves (low, middle, high).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..profilers.cluster import Cluster
from ..profilers.fits.prediction import Prediction
from ..runtime.decisions import PipelineDecision
from ..solvers.pipemoe.seconds import layer_seconds
from ..solvers.seconds import attention_seconds, exchange_seconds, expert_seconds, slowest, step_seconds, total
from ..traces.model import ModelSpec
from .predicted import Predicted, by_class
from .speeds import Speeds
from .tally import Tally

__all__ = ["Chunk", "Pipeline"]

PASSES = ("moe_s", "moe_backward_s")
Stages = tuple[Prediction, Prediction, Prediction]
PARTS = ("attention_s", "dispatch_s", "experts_s", "combine_s", *PASSES)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Seconds of one chunk of every layer in its three stages, `[B, L]`; the exchanges one a link class, too."""

    dispatch_by_class: list[Prediction]
    experts: Prediction
    combine_by_class: list[Prediction]

    @property
    def stages(self) -> Stages:
        """Dispatch, experts, combine."""
        return slowest(self.dispatch_by_class), self.experts, slowest(self.combine_by_class)

    def backward_stages(self, factor: float) -> Stages:
        """Gradients go back through the combine, the experts, `factor` times as long, and the dispatch."""
        dispatch, experts, combine = self.stages
        return combine, _times(factor, experts), dispatch


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A tally, and what times it at any degrees.

    Parameters
    ----------
    speeds
        With curves of exchanges and experts.
    backward
        How many times as long as forward the experts compute backward; 0 without a backward pass.
    full_duplex
        As in `solvers.pipemoe.seconds.layer_seconds`.
    """

    tally: Tally
    speeds: Speeds
    cluster: Cluster
    model: ModelSpec
    backward: float
    full_duplex: bool

    def predicted(self, degrees: PipelineDecision) -> Predicted:
        """The seconds of a step and of its parts at the degrees of every layer."""
        ports, forward_L = self.tally.ports, np.array(degrees.forward)
        assert ports is not None
        chunk = self.chunk(forward_L)
        layers: dict[str, Prediction] = {}
        if self.speeds.attention:
            layers["attention_s"] = attention_seconds(ports.tokens, ports.contexts, self.speeds.attention)
        dispatch, combine = (
            [_times(forward_L, part) for part in parts] for parts in (chunk.dispatch_by_class, chunk.combine_by_class)
        )
        layers |= by_class("dispatch", dispatch, self.cluster) | by_class("combine", combine, self.cluster)
        layers["experts_s"] = _times(forward_L, chunk.experts)
        passes = {"moe_s": (forward_L, chunk.stages)}
        if degrees.backward is not None:
            backward_L = np.array(degrees.backward)
            passes["moe_backward_s"] = (backward_L, self.chunk(backward_L).backward_stages(self.backward))
        layers |= {name: self._pass(*one) for name, one in passes.items()}
        crossed_QB = np.sum([self._crossed(*one) for one in passes.values()], axis=0)
        seconds = {name: step_seconds(found, self.model.num_layers) for name, found in layers.items()}
        seconds["step_s"] = total([seconds[name] for name in ("attention_s", *PASSES) if name in seconds])  # (1)
        outside = {name: float(layers[name].extrapolated.mean()) for name in PARTS if name in layers}
        return Predicted(seconds, {name: share for name, share in outside.items() if share}, crossed_QB)

    def chunk(self, degree_L: NDArray[np.int64]) -> Chunk:
        """The seconds of one chunk where every layer is cut into `degree_L` of them."""
        ports, speeds = self.tally.ports, self.speeds
        assert ports is not None
        assert speeds.exchange is not None
        assert speeds.experts is not None
        copy_bytes = float((self.model.hidden_size or 0) * (self.model.dtype_bytes or 0))
        busiest = (one.max(axis=(3, 4), keepdims=True) for one in (ports.dispatch, ports.combine))
        dispatch, combine = (-(-one // degree_L[:, None, None, None]) for one in busiest)
        return Chunk(
            exchange_seconds(dispatch, copy_bytes, speeds.exchange),
            expert_seconds(-(-self.tally.loads // degree_L[:, None]), self.tally.slots, speeds.experts),
            exchange_seconds(combine, copy_bytes, speeds.exchange),
        )

    def forward_s(self, chunk: Chunk, degree_L: NDArray[np.int64]) -> Prediction:
        """Seconds from the first dispatch to the last combine, `[B, L]`."""
        return self._pass(degree_L, chunk.stages)

    def backward_s(self, chunk: Chunk, degree_L: NDArray[np.int64]) -> Prediction:
        """Seconds of the backward pass, `[B, L]`."""
        return self._pass(degree_L, chunk.backward_stages(self.backward))

    def _pass(self, degree_L: NDArray[np.int64], stages: Stages) -> Prediction:
        return _levels(lambda *stage_BL: self._taken(degree_L, *stage_BL), *stages)

    def _crossed(self, degree_L: NDArray[np.int64], stages: Stages) -> NDArray[np.float64]:
        """Seconds of a pass over all layers, exchanges at each level with experts at each, `[Q Q, B]`."""
        first, middle, last = (np.stack([one.low, one.seconds, one.high]) for one in stages)
        crossed_QQBL = self._taken(degree_L, first[:, None], middle[None], last[:, None])
        crossed_QB: NDArray[np.float64] = crossed_QQBL.sum(axis=3).reshape(-1, crossed_QQBL.shape[2])
        return crossed_QB

    def _taken(self, degree_L: NDArray[np.int64], *stages: NDArray[np.float64]) -> NDArray[np.float64]:
        return layer_seconds(degree_L, *stages, full_duplex=self.full_duplex)


def _times(factor: Any, seconds: Prediction) -> Prediction:
    return _levels(lambda one: factor * one, seconds)


def _levels(how: Callable[..., NDArray[np.float64]], *parts: Prediction) -> Prediction:
    """`how` of the parts at every level; it grows with each of them."""
    return Prediction(
        seconds=how(*(part.seconds for part in parts)),
        low=how(*(part.low for part in parts)),
        high=how(*(part.high for part in parts)),
        extrapolated=np.asarray(np.any([part.extrapolated for part in parts], axis=0)),
    )
