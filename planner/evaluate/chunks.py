"""A cut: into which chunks a pass of every MoE layer is divided, and in how many calls its experts compute each.

The forward pass keeps a graph for every piece that a backward chunk takes back, so experts are called piece by piece,
and layers are cut into pieces at the boundaries of either pass (runtime/engine/chunks.py). Predicted are passes of the
same chunks, and passes of equal chunks of which one degree divides the other: with p pieces, each chunk of a pass of
degree r is p / r calls of the experts, all alike.

Legend: L MoE layers; C chunks, or one that stands for all where they are alike; B steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...runtime.decisions import SHARE_DIGITS, PipelineDecision, boundaries
from ...solvers.pipemoe.seconds import chunk_seconds, layer_seconds

__all__ = ["Cut", "Cuts"]

SLACK = 1e-9  # a share that is 1 / r but for rounding takes no row more


@dataclass(frozen=True, slots=True)
class Cut:
    """The chunks of one pass of every layer.

    Parameters
    ----------
    degree
        How many, `[L]`.
    calls
        Of the experts a chunk, `[L]`.
    shares
        Of a layer in each of its chunks, `[C, L]`, 0 beyond its last; None: equal ones.
    """

    degree: NDArray[np.int64]
    calls: NDArray[np.int64]
    shares: NDArray[np.float64] | None = None

    @classmethod
    def equal(cls, degree: int, num_layers: int, calls: int = 1) -> Self:
        """The same number of equal chunks in every layer."""
        return cls(np.full(num_layers, degree), np.full(num_layers, calls))

    @classmethod
    def of(cls, shares: Sequence[Sequence[float]], calls: NDArray[np.int64] | None = None) -> Self:
        """The chunks of these shares, a tuple a layer; one call each unless told."""
        degree_L = np.array([len(column) for column in shares])
        share_CL = np.zeros((degree_L.max(), len(shares)))
        for layer, column in enumerate(shares):
            share_CL[: len(column), layer] = column
        return cls(degree_L, np.ones_like(degree_L) if calls is None else calls, share_CL)

    def parts(self, rows: NDArray[np.int64], calls: NDArray[np.int64] | int = 1) -> list[NDArray[np.int64]]:
        """Rows of each chunk, or of each of its `calls` `[L]`, of `rows` `[B, L, ...]`, rounded up to whole rows."""
        other_axes = (1,) * (rows.ndim - 2)
        if self.shares is None:
            return [-(-rows // (calls * self.degree).reshape(-1, *other_axes))]
        parts = (self.shares / calls).reshape(*self.shares.shape, *other_axes)
        return [np.ceil(part * rows - SLACK).astype(np.int64) for part in parts]

    def padded(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """`rows` `[B, L]` padded to a multiple of the pieces, as the runtime pads a fixed capacity."""
        pieces_L = self.degree * self.calls
        return np.asarray(-(-rows // pieces_L) * pieces_L)

    def padded_sizes(self, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Rows of each chunk, of `rows` `[B, L]` padded to a fixed capacity."""
        padded_BL = self.padded(rows)
        if self.shares is None:
            return [padded_BL // self.degree]
        ends = [np.rint(end_L * padded_BL) for end_L in np.cumsum(self.shares, axis=0).round(SHARE_DIGITS)]
        return [(end - start).astype(np.int64) for start, end in pairwise([np.zeros_like(ends[0]), *ends])]

    def present(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of chunks `[..., C, B, L]` without those of chunks that a layer does not have."""
        return seconds if self.shares is None else seconds * (self.shares > 0)[:, None]

    def busy(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """How long a stage whose chunks take `seconds` `[..., C, B, L]` works, `[..., B, L]`."""
        return np.asarray(seconds.sum(axis=-3) * (self.degree if self.shares is None else 1))

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
        """The cuts that carry a decision out.

        Raises
        ------
        InputError
            Passes that cut each other's chunks unevenly.
        """
        shares = decision.shares
        there, back = np.array(decision.forward), np.array(decision.backward or decision.forward)
        fits = np.maximum(there, back) % np.minimum(there, back) == 0
        if shares is not None and shares.backward is not None:
            fits &= [_fit(*both) for both in zip(shares.forward, shares.backward, strict=True)]
        if not fits.all():
            layer = int(fits.argmin())
            raise InputError(
                f"MoE layer {layer} in {there[layer]} chunks forward and {back[layer]} backward, which cut each other"
                " unevenly; expected the same chunks, or equal ones of which one number divides the other"
            )
        calls = [np.maximum(there, back) // degree_L for degree_L in (there, back)]
        cuts = [Cut(there, calls[0]), Cut(back, calls[1])]
        if shares is not None:
            passes = (shares.forward, shares.backward or shares.forward)
            cuts = [Cut.of(one, calls_L) for one, calls_L in zip(passes, calls, strict=True)]
        return cls(cuts[0], None if decision.backward is None else cuts[1])


def _fit(forward: Sequence[float], backward: Sequence[float]) -> bool:
    """Whether the chunks of both passes, as the runtime rounds them, are the same, or all of a pass alike."""
    if len(forward) == len(backward):
        return boundaries(forward) == boundaries(backward)
    return all(boundaries(one) == boundaries([1 / len(one)] * len(one)) for one in (forward, backward))
