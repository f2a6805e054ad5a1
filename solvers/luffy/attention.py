"""Attention of the samples that a device holds: its law, and the seconds of the busiest device.

Legend: I samples of a step; D devices; Q sizes at which a curve is asked.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ...profilers.fits.laws import least_relative
from ..arrays import Floats, Ints
from ..seconds import Curve3

UNIT_S = 2.0**-40  # of a sample's cost: whole numbers of it add up to the same on every rank
MOST_S = 2.0**10  # that attention to a sample takes; more would pass 52 bits of units
MOST_TOKENS = 2**62
BATCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
NOTHING_S = 1e-12  # to start, or a call; less is rounding
LENGTHS = 9  # quantiles of the samples' lengths at which a curve is asked


@dataclass(frozen=True, slots=True)
class Law:
    """Seconds of attention of a batch, and how samples may be dealt.

    Notes
    -----
    LUFFY's Eq. 1 for B samples padded to L tokens; packed, a sample pays for its own tokens alone:

        padded:  t = start + call + B (token L + square L^2)
        packed:  t = start + call G + sum_i (token n_i + square c_i)

    with n_i a sample's tokens, c_i its contexts, the sum over tokens of 2 p + 1 with p their positions (L^2 of a whole
    sample), and G distinct lengths, each of which attends in a call of its own. A device without samples takes none.
    """

    #: call, token, square: seconds of a call, a token, and a token squared; none negative
    call_s: float
    token_s: float
    square_s: float
    batches: Literal["packed", "padded"] = "packed"
    numbers: Literal["equal", "free"] = "equal"  #: Whether devices take equal numbers of samples, rounded up
    #: The most tokens of a device, padding included, over the mean tokens of all; None: no limit
    room: float | None = None
    candidates: int | None = None  #: Of "paper": devices that a sample may go to, the fewest copies first
    start_s: float = 0.0  #: To start the attention of a device, beside its calls

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        seconds = (self.start_s, self.call_s, self.token_s, self.square_s)
        if not (min(seconds) >= 0 and max(seconds[2:]) > 0 and max(seconds) < MOST_S):
            raise ValueError(f"attention of {seconds} s; expected none negative, not all 0, each below {MOST_S:.0f}")
        if self.room is not None and not 1 <= self.room <= MOST_TOKENS:
            raise ValueError(f"room for {self.room} times the mean tokens; expected at least 1")
        if self.candidates is not None and self.candidates < 1:
            raise ValueError(f"{self.candidates} candidates; expected at least 1")


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention of a step's samples at their new homes."""

    law: Law
    #: tokens, contexts: of each sample, int64 `[I]`
    tokens: Ints
    contexts: Ints
    follows: bool = True  #: Whether there is any: after the last layer there is none, and nothing is counted

    @cached_property
    def cost(self) -> Floats:
        """Seconds of each sample without starts and calls, `[I]`, in whole units of 2**-40 s: they add up exactly."""
        seconds_I = self.follows * (self.law.token_s * self.tokens + self.law.square_s * self.contexts)
        return np.asarray(np.rint(np.clip(seconds_I, 0, MOST_S) / UNIT_S) * UNIT_S)

    @property
    def start_s(self) -> float:
        """Seconds to start the attention of a device, beside its calls."""
        return self.follows * self.law.start_s

    @property
    def call_s(self) -> float:
        """Seconds of a call."""
        return self.follows * self.law.call_s

    @cached_property
    def kind(self) -> Ints:
        """Samples of one length attend in one call: the place of each one's length among all, `[I]`."""
        return np.unique(self.tokens, return_inverse=True)[1].astype(np.int64)

    def room(self, num_devices: int) -> int:
        """The most tokens of a device."""
        if self.law.room is None:
            return MOST_TOKENS
        return math.ceil(self.law.room * int(self.tokens.sum()) / num_devices)

    def places(self, num_devices: int) -> Ints:
        """The most samples that each device takes, `[D]`."""
        most = len(self.tokens) if self.law.numbers == "free" else -(-len(self.tokens) // num_devices)
        return np.full(num_devices, most, np.int64)

    def seconds(self, device_of_sample: NDArray[np.integer], num_devices: int) -> Floats:
        """Seconds of every device, `[D]`."""
        found = np.zeros(num_devices)
        for d in np.unique(device_of_sample).tolist():
            here_I = device_of_sample == d
            if self.law.batches == "padded":
                found[d] = self.start_s + self.call_s + here_I.sum() * self.cost[here_I].max()
            else:
                calls = len(np.unique(self.tokens[here_I]))
                found[d] = self.start_s + self.call_s * calls + self.cost[here_I].sum()
        return found


def deal(weight: NDArray[Any], places: Ints) -> Ints:
    """The device of every sample, `[I]`: the largest first, each to the device with the least and a place.

    Parameters
    ----------
    weight
        Of each sample, `[I]`.
    places
        The most samples that each device takes, `[D]`.
    """
    home_I, taken_D, left_D = np.zeros(len(weight), np.int64), np.zeros(len(places)), places.copy()
    for sample in np.argsort(-weight, kind="stable"):
        device = np.where(left_D > 0, taken_D, np.inf).argmin()
        home_I[sample] = device
        taken_D[device] += weight[sample]
        left_D[device] -= 1
    return home_I


def law_of(curve: Curve3, tokens: NDArray[np.integer], **how: object) -> Law:
    """The law nearest to a curve over (batch, length, calls) at the lengths of these samples, `[I]`; `how` as in `Law`.

    Notes
    -----
        minimise  sum_q ((start + call G_q + token B_q L_q + square B_q L_q^2) / t_q - 1)^2   over none negative

    exact where the curve is such a law. Batches attend in one call, and in one for each sequence.
    """
    lengths = np.unique(np.quantile(tokens, np.linspace(0, 1, LENGTHS)).round()).clip(1)
    batch_Q, length_Q = (one.ravel().repeat(2) for one in np.meshgrid(BATCHES, lengths))
    calls_Q = np.where(np.arange(len(batch_Q)) % 2, batch_Q, 1.0)
    terms_Q4 = np.stack([np.ones(len(batch_Q)), calls_Q, batch_Q * length_Q, batch_Q * length_Q**2], axis=1)
    found = least_relative(terms_Q4, curve(batch_Q, length_Q, calls_Q).seconds)
    start_s, call_s = (seconds if seconds > NOTHING_S else 0.0 for seconds in found[:2])
    return Law(call_s, found[2], found[3], start_s=start_s, **how)  # type: ignore[arg-type]
