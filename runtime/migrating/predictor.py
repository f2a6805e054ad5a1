"""The predictor: from a sample's pairs with the experts of one layer to its copies to the devices at the next.

Legend: I samples; L MoE layers; E experts; D devices.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, UsageError
from ..plan import Plan

MAX_BYTES = 2**30
KEY = "copies_per_pair"
FIXED = 2.0**20
MOST = 2.0**10  # copies that a pair brings; more is damage, and 2**31 pairs of it would pass 63 bits


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """A linear map a transition: `per_pair[l]` are the copies to each device at layer l + 1 that a pair with each
    expert of layer l brings, float32 `[L-1, E, D]`.
    """

    per_pair: NDArray[np.float32]

    def copies(self, layer: int, experts: NDArray[np.integer]) -> NDArray[np.float64] | None:
        """The copies to each device at the next layer `[I, D]` of samples with these pairs `[I, E]`; None after the
        last layer.

        They are multiples of 2**-20, summed as integers: equal on every rank, whatever it computes with.
        """
        if layer >= len(self.per_pair):
            return None
        fixed_ED = np.rint(np.clip(self.per_pair[layer].astype(np.float64), -MOST, MOST) * FIXED).astype(np.int64)
        return np.asarray(np.maximum(experts.astype(np.int64) @ fixed_ED, 0) / FIXED)

    def to_bytes(self) -> bytes:
        """A safetensors file of it, the same bytes every time."""
        from safetensors.numpy import save

        return save({KEY: np.ascontiguousarray(self.per_pair)}, {"format": "moeplan netmoe predictor 1"})

    @classmethod
    def from_bytes(cls, contents: bytes, shape: tuple[int, int, int]) -> "Predictor":
        """The predictor in a file, of this shape.

        Raises
        ------
        InputError
            The file is damaged, holds something else, or numbers that are not finite.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        expected = f"expected {KEY} float32 {list(shape)}"
        if len(contents) > MAX_BYTES or len(contents) < 8 or not _declares(contents, shape):
            raise InputError(f"no predictor of this plan in {len(contents):,} bytes; {expected}")
        try:
            per_pair = load(contents)[KEY]
        except (SafetensorError, ValueError) as error:
            raise InputError(f"damaged predictor ({str(error)[:80]}); {expected}") from error
        if not np.isfinite(per_pair).all():
            raise InputError(f"predictor with numbers that are not finite; {expected}")
        return cls(per_pair)


def predictor_of(plan: Plan, folder: Path | None) -> Predictor | None:
    """The predictor in the folder of a plan with a sample policy; None where that looks at no next layer.

    Raises
    ------
    UsageError
        There is no folder to look in.
    InputError
        It is not there, damaged, or another one than the plan's.
    """
    policy, model = plan.decisions.sample_policy, plan.model
    if policy is None or policy.predictor is None:
        return None
    if folder is None:
        raise UsageError(
            f"the plan names {policy.predictor.file}, which lies beside its file, but was not loaded from one; load it"
            " with moeplan.runtime.load_plan"
        )
    contents = policy.predictor.read(folder)
    return Predictor.from_bytes(contents, (model.num_layers - 1, model.num_experts, plan.cluster.num_devices))


def _declares(contents: bytes, shape: tuple[int, int, int]) -> bool:
    """Check whether a safetensors file has the one tensor of this shape and its bytes, before anything is allocated."""
    size = int.from_bytes(contents[:8], "little")
    try:
        header = json.loads(contents[8 : 8 + min(size, 4096)])
        declared = header[KEY]
        alike = (declared["dtype"], declared["shape"]) == ("F32", list(shape)) and set(header) <= {KEY, "__metadata__"}
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return alike and len(contents) == 8 + size + 4 * math.prod(shape)
