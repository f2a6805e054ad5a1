"""The tokens of a recording that are kept: no padding, a share of the samples, up to a number.

Legend: T tokens; R tokens kept.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ..split import mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The rule by which tokens are kept.

    Parameters
    ----------
    max_tokens
        The most tokens kept in all; None: no bound.

    Raises UsageError where the rate is not in (0, 1], or the bound below 1.
    """

    sample_rate: float = 1.0  #: The share of samples kept, chosen by `sampled`
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.sample_rate <= 1:
            raise UsageError(f"sample rate {self.sample_rate}; expected a share above 0, at most 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"at most {self.max_tokens} tokens; expected 1 or more")

    def rows(
        self, position: NDArray[np.int32], sample: NDArray[np.int64] | None, num_before: int
    ) -> NDArray[np.int64] | None:
        """The rows to keep `[R]`, or None: all of them.

        Parameters
        ----------
        position
            int32 `[T]`; negative: padding.
        num_before
            Tokens kept so far.
        """
        kept = position >= 0
        if self.sample_rate < 1:
            if sample is None:
                raise UsageError("a sample rate needs sample ids; give them, or record every token")
            kept &= sampled(sample, self.sample_rate)
        left = len(position) if self.max_tokens is None else self.max_tokens - num_before
        if left >= len(position) and kept.all():
            return None
        return np.flatnonzero(kept)[:left]

    def full(self, num_before: int) -> bool:
        """Check whether no further token would be kept."""
        return self.max_tokens is not None and num_before >= self.max_tokens


def sampled(sample: NDArray[np.int64], rate: float) -> NDArray[np.bool_]:
    """Mask of the samples that are kept: a hash of its id alone, so every rank, layer and run chooses alike.

    Notes
    -----
    The hash `mixed` over 2^64 is below `rate`; other bits than those that split a trace (`split.fitted`).
    """
    share: NDArray[np.bool_] = mixed(sample) * 2.0**-64 < rate
    return share


def chosen_samples(num_samples: int, rate: float) -> NDArray[np.int64]:
    """The ordinals that `sampled` keeps of so many samples, so that the others need not be run.

    Raises UsageError where it keeps none.
    """
    samples = np.arange(num_samples, dtype=np.int64)
    kept = samples if rate >= 1 else samples[sampled(samples, rate)]
    if not len(kept):
        raise UsageError(f"a sample rate of {rate} keeps none of {num_samples} samples; give a higher one")
    return kept
