"""A cut: into which chunks a pass of every MoE layer is divided.

Legend: L MoE layers; C chunks, or one that stands for all where they are alike; B steps.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..runtime.decisions import PipelineDecision
from ..solvers.pipemoe.seconds import chunk_seconds, layer_seconds

__all__ = ["Cut", "Cuts"]

SLACK = 1e-9  # a share that is 1 / r but for rounding takes no row more


@dataclass(frozen=True, slots=True)
class Cut:
    """The chunks of one pass of every layer.

    Parameters
    ----------
    degree
        How many, `[L]`.
    shares
        Of a layer in each of its chunks, `[C, L]`, 0 beyond its last; None: equal ones.
    """

    degree: NDArray[np.int64]
    shares: NDArray[np.float64] | None = None

    @classmethod
    def equal(cls, degree: int, num_layers: int) -> Self:
        """The same number of equal chunks in every layer."""
        return cls(np.full(num_layers, degree))

    @classmethod
    def of(cls, shares: tuple[tuple[float, ...], ...]) -> Self:
        """The chunks of these shares, a tuple a layer."""
        share_CL = np.zeros((max(map(len, shares)), len(shares)))
        for layer, column in enumerate(shares):
            share_CL[: len(column), layer] = column
        return cls(np.array([len(column) for column in shares]), share_CL)

    def sizes(self, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """What is in each chunk of `rows` `[B, L, ...]`, in whole rows, rounded up."""
        other_axes = (1,) * (rows.ndim - 2)
        if self.shares is None:
            return [-(-rows // self.degree.reshape(-1, *other_axes))]
        shares = self.shares.reshape(*self.shares.shape, *other_axes)
        return [np.ceil(share * rows - SLACK).astype(np.int64) for share in shares]

    def padded(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """`rows` `[B, L]` padded to whole chunks."""
        found: NDArray[np.int64] = np.sum(self.sizes(rows), axis=0)
        return found * self.degree if self.shares is None else found

    def present(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of chunks `[..., C, B, L]` without those of chunks that a layer does not have."""
        return seconds if self.shares is None else seconds * (self.shares > 0)[:, None]

    def busy(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """How long a stage whose chunks take `seconds` `[..., C, B, L]` works, `[..., B, L]`."""
        found: NDArray[np.float64] = seconds.sum(axis=-3)
        return found * self.degree if self.shares is None else found

    def taken(self, *stages: NDArray[np.float64], full_duplex: bool) -> NDArray[np.float64]:
        """From the first chunk's first stage to the last one's last; three of `[..., C, B, L]` give `[..., B, L]`."""
        if self.shares is None:
            first, middle, last = (stage[..., 0, :, :] for stage in stages)
            return layer_seconds(self.degree, first, middle, last, full_duplex=full_duplex)
        return chunk_seconds(*(np.moveaxis(stage, -3, 0) for stage in stages), full_duplex=full_duplex)


@dataclass(frozen=True, slots=True)
class Cuts:
    """A cut for each pass; `backward` is None without one."""

    forward: Cut
    backward: Cut | None

    @classmethod
    def of(cls, decision: PipelineDecision) -> Self:
        """The cuts that carry a decision out."""
        if decision.shares is not None:
            forward, backward = decision.shares.forward, decision.shares.backward
            return cls(Cut.of(forward), None if backward is None else Cut.of(backward))
        return cls(
            Cut(np.array(decision.forward)), None if decision.backward is None else Cut(np.array(decision.backward))
        )
