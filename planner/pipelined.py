"""The predicted seconds of a tally whose MoE layers are pipelined.

A chunk is an equal share of every device's tokens, in whole tokens, so the busiest port and the busiest device of a
layer stay so in each of its chunks, and decide how long that takes. Seconds add up to `step_s` by pass, no longer by
part: `dispatch_s`, `experts_s` and `combine_s` are how long a stage is busy, and stages overlap.

    step_s = attention_s + moe_s + moe_backward_s                                                               (1)

Legend: B steps; L MoE layers; R degrees.
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
PARTS = ("attention_s", "dispatch_s", "experts_s", "combine_s", *PASSES)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Seconds of one chunk of every layer in its three stages, `[B, L]`; the exchanges one a link class, too."""

    dispatch_by_class: list[Prediction]
    experts: Prediction
    combine_by_class: list[Prediction]

    @property
    def stages(self) -> tuple[Prediction, Prediction, Prediction]:
        """Dispatch, experts, combine."""
        return slowest(self.dispatch_by_class), self.experts, slowest(self.combine_by_class)


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
        layers["moe_s"] = self.forward_s(chunk, forward_L)
        if degrees.backward is not None:
            backward_L = np.array(degrees.backward)
            layers["moe_backward_s"] = self.backward_s(self.chunk(backward_L), backward_L)
        seconds = {name: step_seconds(found, self.model.num_layers) for name, found in layers.items()}
        seconds["step_s"] = total([seconds[name] for name in ("attention_s", *PASSES) if name in seconds])  # (1)
        outside = {name: float(layers[name].extrapolated.mean()) for name in PARTS if name in layers}
        return Predicted(seconds, {name: share for name, share in outside.items() if share})

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
        return self._pass(degree_L, *chunk.stages)

    def backward_s(self, chunk: Chunk, degree_L: NDArray[np.int64]) -> Prediction:
        """Seconds of the backward pass, `[B, L]`: gradients go back through the combine, the experts, the dispatch."""
        dispatch, experts, combine = chunk.stages
        return self._pass(degree_L, combine, _times(self.backward, experts), dispatch)

    def _pass(self, degree_L: NDArray[np.int64], *stages: Prediction) -> Prediction:
        def seconds(*stage_BL: NDArray[np.float64]) -> NDArray[np.float64]:
            return layer_seconds(degree_L, *stage_BL, full_duplex=self.full_duplex)

        return _levels(seconds, *stages)


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
