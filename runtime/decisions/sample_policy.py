"""Layers that re-home their samples."""

from ...errors import InputError
from ...profilers.cluster import Cluster
from ...solvers.luffy.attention import Law
from ...traces.model import ModelSpec
from .decision import Decision, Layer, SidecarFile


class SamplePolicyDecision(Decision):
    """Layers that re-home their samples, the method, and the prediction of the next layer."""

    key = "sample_policy"
    dispatch_models = ("migrating",)
    unwritten = ("attention",)

    method: str
    layers: tuple[Layer, ...]  #: Ordinals of the MoE layers whose combine delivers samples to new homes, ascending
    predictor: SidecarFile | None = None  #: None: only this layer's routing decides
    attention: Law | None = None  #: What attention costs, of methods that count it (`solvers.luffy.METHODS`)

    def check(self, model: ModelSpec, _cluster: Cluster, /) -> None:
        """Refuse layers that the model has not, or that do not ascend."""
        if sorted(set(self.layers)) != [*self.layers] or max(self.layers, default=0) >= model.num_layers:
            raise InputError(
                f"sample_policy of layers {self.layers!s:.80}; expected ascending ordinals below {model.num_layers}"
            )
