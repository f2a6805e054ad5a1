"""Attention by a roofline: seconds that a device's data sheet allows, with nothing measured.

Legend: B sequences; L tokens of each; q of them computed in this call, the others cached; M hidden size; Q elements of
a token's queries; K of its K and V.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from ...errors import InputError
from .sizes import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The longer of two times: of the multiply-adds at the peak rate, and of the bytes at the memory's rate.

    Notes
    -----
    The call is the case `attention`: projections to queries, K and V and of the output, and causal scores and values.
    With n = B L tokens computed (`solvers.seconds`: in a step, B and L are such that n and the context are right),

        multiply-adds   n W + n (L + 1) Q,   W = M (2 Q + K)                                            (1)
        bytes / width   W + 2 n M + n K + n (L / q + 1) K / 2                                           (2)
        t = max(2 (1) / (compute_share flops), width (2) / (memory_share bytes_per_s))                  (3)

    With Q = M and K = 2 M (1) is the case's own count. (2) has the weights, the hidden vectors in and out, K and V as
    they are written, and as they are read: q tokens of a sequence share one reading of its context, on average
    (L + q) / 2 tokens. Whole sequences (q = L) read what they wrote; tokens decoded one per step (q = 1) read all that
    came before each, which soon takes longer than all else. Launches are not counted.
    """

    kind: Literal["roofline"] = "roofline"
    flops: float  #: Peak FLOP/s of dense products in the dtype
    bytes_per_s: float  #: Of the device's memory
    width: int  #: Bytes of an element
    #: compute_share, memory_share: of these rates, what kernels are taken to reach
    compute_share: float
    memory_share: float
    #: W, elements of a model's projections where they are of low rank; None: M (2 Q + K). A file has no model's
    weights: Annotated[float | None, Field(exclude=True, ge=1)] = None

    axes: ClassVar[tuple[str, ...]] = ("batch", "length", "hidden", "q", "kv", "queries")
    drawn_at: ClassVar[Mapping[str, int]] = {
        "batch": 1,
        "hidden": 4096,
        "q": 4096,
        "kv": 8192,
        "queries": 2**30,
    }  #: In pictures
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        shares = 0 < self.compute_share <= 1 and 0 < self.memory_share <= 1
        if not (1 <= self.flops < 1e24 and 1 <= self.bytes_per_s < 1e24 and 1 <= self.width <= 16 and shares):
            raise InputError(
                f"roofline of {self.flops} FLOP/s and {self.bytes_per_s} bytes/s, of which {self.compute_share} and"
                f" {self.memory_share} are reached; expected rates of 1 to 1e24 and shares above 0, at most 1"
            )

    def seconds(self, batch: Array, length: Array, hidden: Array, q: Array, kv: Array, queries: Array) -> Array:
        """Seconds of `batch` sequences of `length` tokens."""
        tokens, projections = batch * length, hidden * (2 * q + kv) if self.weights is None else self.weights
        macs = tokens * projections + tokens * (length + 1) * q  # (1)
        read = tokens * (length / np.clip(queries, 1, np.maximum(length, 1)) + 1) * kv / 2
        elements = projections + 2 * tokens * hidden + tokens * kv + read  # (2)
        compute_s = 2 * macs / (self.compute_share * self.flops)
        return np.maximum(compute_s, self.width * elements / (self.memory_share * self.bytes_per_s))  # (3)
