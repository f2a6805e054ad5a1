"""What counts in a search besides the transitions between layers.

Legend: L MoE layers; E experts a layer.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .programme import Layout, Programme

__all__ = ["Terms"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What counts besides the weights between layers.

    Parameters
    ----------
    beside
        Weights of pairs inside each layer `[L, E, E]`, symmetric; the diagonal counts for nothing.
    load, cap
        `[L, E]`, and the most of it that a device may hold in each layer `[L]`; None: no limit.
    twin
        int64 `[L, E]`: the expert that replicas share, -1 without; twins keep to different devices.
    """

    beside: NDArray[np.float64] | None = None
    load: NDArray[np.float64] | None = None
    cap: NDArray[np.float64] | None = None
    twin: NDArray[np.int64] | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing counts besides."""
        return self.beside is None and self.cap is None and self.twin is None

    def of_node(self, members: Layout) -> "Terms":
        """The pairs of a node's experts, a layer; layers with fewer of them are padded with what weighs nothing.

        Caps and twins do not go with them.
        """
        assert self.cap is None
        assert self.twin is None
        if self.beside is None:
            return Terms()
        most = max(map(len, members))
        beside = np.zeros((len(members), most, most))
        for layer, member_E in enumerate(members):
            beside[layer, : len(member_E), : len(member_E)] = self.beside[layer][np.ix_(member_E, member_E)]
        return Terms(beside)

    def inside(self, programme: Programme, layout: Layout, layer: int) -> float:
        """The value of the pairs inside a layer."""
        if self.beside is None:
            return 0.0
        near_EE = programme.near[layout[layer][:, None], layout[layer]]
        weight_EE = self.beside[layer, : len(near_EE), : len(near_EE)]
        return float((weight_EE * near_EE).sum() - weight_EE.diagonal() @ near_EE.diagonal()) / 2

    def value(self, programme: Programme, layout: Layout) -> float:
        """The value of a layout with the pairs inside layers."""
        return programme.value(layout) + sum(self.inside(programme, layout, i) for i in range(len(layout)))
