"""The predictor: from a sample's pairs with the experts of one layer to its copies to the devices at the next.

Legend: I fitted samples; L MoE layers; E experts; D devices.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...files import size_of
from .counted import Counted, SampleTraffic

__all__ = ["MAX_BYTES", "Predictor", "fit_predictor", "read_predictor"]

RIDGE = 0.03  # of the mean square of an expert's pairs
MAX_BYTES = 2**30
KEY = "copies_per_pair"
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """One linear map a transition: `per_pair[l]` are the copies to each device at layer l + 1 that a pair with each
    expert of layer l brings, float32 `[L-1, E, D]`.
    """

    per_pair: NDArray[np.float32]

    def copies(self, layer: int, experts: NDArray[np.integer]) -> Numbers | None:
        """The copies to each device at the next layer `[I, D]` of samples with these pairs `[I, E]`; None after the
        last layer.
        """
        if layer >= len(self.per_pair):
            return None
        return np.asarray(np.maximum(experts.astype(np.float64) @ self.per_pair[layer].astype(np.float64), 0))

    def to_bytes(self) -> bytes:
        """It as a safetensors file, the same bytes every time."""
        from safetensors.numpy import save

        return save({KEY: np.ascontiguousarray(self.per_pair)}, {"format": "moeplan netmoe predictor 1"})

    @property
    def file_name(self) -> str:
        """Its name beside a plan, by its hash."""
        return f"predictor-{hashlib.sha256(self.to_bytes()).hexdigest()[:16]}.safetensors"

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


def read_predictor(path: Path) -> bytes:
    """The bytes of a predictor beside its plan.

    Raises
    ------
    InputError
        There is none, or one too large.
    """
    if (size := size_of(path, what="the plan's predictor")) > MAX_BYTES:
        raise InputError(f"{path}: {size:,} bytes; expected a predictor of at most {MAX_BYTES:,}")
    return path.read_bytes()


def fit_predictor(counted: Counted, traffic: SampleTraffic, fitted_I: NDArray[np.bool_], top_k: int) -> Predictor:
    """The predictor of fitted samples under a placement.

    Notes
    -----
    num(l) A(l -> l+1), where A[e, d] is the share of the tokens at expert e that visit device d next, over K because
    each of a token's K choices says so; it is then corrected by what it leaves of the fitted samples, by ridge
    regression towards no correction. With x_i, y_i a sample's pairs and next copies, over the root of its pairs,

        A + argmin_B sum_i |y_i - x_i (A + B)|^2 + lambda |B|^2,      lambda = RIDGE mean_e sum_i x_i[e]^2        (1)

    Where only counts are known nothing links two layers, and A is the same for all experts: the mean.
    """
    shape = (counted.experts.shape[1] - 1, counted.experts.shape[2], traffic.copies.shape[2])
    per_pair = np.zeros(shape, np.float32)
    for layer in range(shape[0]):
        pairs_IE = counted.experts[fitted_I, layer].astype(np.float64)
        next_ID = traffic.copies[fitted_I, layer + 1].astype(np.float64)
        prior_ED = _prior(pairs_IE, next_ID, None if traffic.linked is None else traffic.linked[layer], top_k)
        scale_I1 = np.sqrt(np.maximum(pairs_IE.sum(axis=1, keepdims=True), 1))
        x_IE, y_ID = pairs_IE / scale_I1, next_ID / scale_I1
        gram_EE = x_IE.T @ x_IE
        ridge = RIDGE * max(float(np.trace(gram_EE)), 1e-9) / len(gram_EE)
        left_ED = x_IE.T @ (y_ID - x_IE @ prior_ED)
        per_pair[layer] = prior_ED + np.linalg.solve(gram_EE + ridge * np.eye(len(gram_EE)), left_ED)  # (1)
    return Predictor(per_pair)


def _prior(pairs_IE: Numbers, next_ID: Numbers, linked_ED: NDArray[np.int64] | None, top_k: int) -> Numbers:
    """A, `[E, D]`: by expert where tokens link the layers and the expert was met, else the mean of all."""
    mean_D = next_ID.sum(axis=0) / max(float(pairs_IE.sum()), 1.0)
    met_E1 = pairs_IE.sum(axis=0)[:, None]
    mean_ED = np.tile(mean_D, (len(met_E1), 1))
    if linked_ED is None:
        return mean_ED
    return np.asarray(np.divide(linked_ED, top_k * met_E1, out=mean_ED, where=met_E1 > 0))


def _declares(contents: bytes, shape: tuple[int, int, int]) -> bool:
    """Whether a safetensors file has the one tensor of this shape and its bytes, before anything is allocated."""
    size = int.from_bytes(contents[:8], "little")
    try:
        header = json.loads(contents[8 : 8 + min(size, 4096)])
        found = header[KEY]
        alike = (found["dtype"], found["shape"]) == ("F32", list(shape)) and set(header) <= {KEY, "__metadata__"}
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return alike and len(contents) == 8 + size + 4 * math.prod(shape)
