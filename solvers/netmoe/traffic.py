"""The copies that each sample exchanges with every device, and what of them crosses the cluster from given homes.

Both exchanges that a sample's new home affects count (Eq. 3-4): in all, and through the busiest port. How much moving
samples may save at most is told before anything is solved.

Legend: I samples; E experts; D devices; N nodes; M sinks, the nodes, or the devices of a single node.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...profilers.cluster import Cluster
from ..arrays import Floats, Ints, checked_counts
from ..ports import sample_copies

EXACT_BITS = 50  # of the sum of all copies, in units
LEAST_POWER = -1000  # of two, of a unit


@dataclass(frozen=True, eq=False)
class Traffic:
    """Copies of each sample with every device, `[I, D]`: of this layer's combine and of the next layer's dispatch."""

    gather: Floats  #: Of the combine ("gather" in the paper) that delivers the samples to their new homes
    scatter: Floats | None  #: Of the next layer's dispatch, as predicted; None where it is not looked at

    @property
    def exchanges(self) -> tuple[Floats, ...]:
        """Exchanges that the solver looks at."""
        return (self.gather,) if self.scatter is None else (self.gather, self.scatter)

    @cached_property
    def unit(self) -> float:
        """A unit of copies whose sums are exact: one where all copies are whole, else 2**-50 of their sum, rounded up
        to a power of two.
        """
        total = float(sum(exchange.sum() for exchange in self.exchanges))
        whole = total < 2.0**EXACT_BITS and all((x == np.rint(x)).all() for x in self.exchanges)
        return 1.0 if whole else math.ldexp(1.0, max(math.frexp(total)[1] - EXACT_BITS, LEAST_POWER))

    @cached_property
    def units(self) -> Ints:
        """The sum of the exchanges in whole units, `[I, D]`: equal on every rank, and so is what is solved with them.

        Each exchange is rounded alone, so that what is equal for all samples stays so.
        """
        units_ID = np.zeros(self.gather.shape, dtype=np.int64)
        for exchange_ID in self.exchanges:
            units_ID += np.rint(exchange_ID / self.unit).astype(np.int64)
        return units_ID


def traffic_of(
    counts: ArrayLike,
    expert_to_device: ArrayLike,
    cluster: Cluster,
    *,
    next_counts: ArrayLike | None = None,
    next_expert_to_device: ArrayLike | None = None,
) -> Traffic:
    """The traffic of samples under a placement of experts (`num` and `ExpDev` of Eq. 2 and 4).

    Parameters
    ----------
    counts, next_counts
        num, the copies of each sample to each expert of this layer and of the next, `[I, E]`; the next may be
        predicted. Where a dispatch sends one copy to a device whatever the experts there, count devices for experts.
    expert_to_device, next_expert_to_device
        The device of every expert, integers `[E]`, or the share of its copies that each device serves, `[E, D]` with
        rows that sum to 1; the next layer's is this layer's unless given.

    Raises
    ------
    ValueError
        Wrong shapes, counts that are negative or not finite, devices out of range, shares that do not sum to 1.
    """
    gather_ID = _by_device(counts, "counts", None, expert_to_device, cluster.num_devices)
    if next_counts is None:
        return Traffic(gather_ID, None)
    map_of_next = expert_to_device if next_expert_to_device is None else next_expert_to_device
    return Traffic(gather_ID, _by_device(next_counts, "next_counts", len(gather_ID), map_of_next, cluster.num_devices))


def _by_device(
    counts: ArrayLike, what: str, num_samples: int | None, expert_to_device: ArrayLike, num_devices: int
) -> Floats:
    shares_ED = _shares(np.asarray(expert_to_device), num_devices)
    counts_IE = checked_counts(counts, what, (num_samples, len(shares_ED)))
    return np.asarray(counts_IE @ shares_ED)


def _shares(found: NDArray[Any], num_devices: int) -> Floats:
    if found.ndim == 1 and found.dtype.kind in "iu":
        if ((found < 0) | (found >= num_devices)).any():
            raise ValueError(f"experts on devices {found.min()} to {found.max()}; expected 0 to {num_devices - 1}")
        return np.asarray(np.eye(num_devices)[found])
    shares_ED = checked_counts(found, "shares of expert_to_device", (None, num_devices))
    off_E = np.abs(shares_ED.sum(axis=1) - 1)
    if off_E.max() > 1e-6:
        raise ValueError(
            f"shares of expert {off_E.argmax()} sum to {shares_ED[off_E.argmax()].sum()}; expected 1: every copy is"
            " served somewhere"
        )
    return shares_ED


@dataclass(frozen=True, slots=True)
class Volumes:
    """The copies of one exchange that cross a link; times the bytes of a copy, its bytes."""

    #: inter, intra: between nodes (s_inter), and between devices of one node (s_intra)
    inter: float
    intra: float
    #: busiest_inter, busiest_intra: the most that a node (Eq. 5), or a device inside its node, sends or receives.
    busiest_inter: float
    busiest_intra: float


def volumes(traffic: Floats, device_of_sample: NDArray[np.integer], cluster: Cluster) -> Volumes:
    """The volumes of one exchange, `[I, D]` copies, with each sample on its device `[I]`."""
    intra_2D, inter_2D = sample_copies(traffic, device_of_sample, cluster)[0]
    inter_2N = inter_2D.reshape(2, cluster.num_nodes, -1).sum(axis=2)
    return Volumes(
        inter=float(inter_2N[0].sum()),
        intra=float(intra_2D[0].sum()),
        busiest_inter=float(inter_2N.max()),
        busiest_intra=float(intra_2D.max()),
    )


@dataclass(frozen=True, slots=True)
class Locality:
    """Copies between nodes (on one node: between devices) of samples dealt out blindly, and the fewest possible."""

    #: Expected when the places are dealt at random: the samples' counts and the popularity of the sinks remain
    blind: float
    least: float  #: No assignment within the capacities has fewer

    @property
    def share(self) -> float:
        """The locality index: no assignment saves more than this share of `blind`."""
        return 1 - self.least / self.blind if self.blind > 0 else 0.0


def locality(traffic: Traffic, capacity: NDArray[np.integer], cluster: Cluster) -> Locality:
    """The locality of samples under a placement, in one pass over the traffic.

    Parameters
    ----------
    capacity
        The most samples per device takes, `[D]`.

    Notes
    -----
    Every sample's own best choice, capacities ignored, is a bound, but a popular sink would promise to all what few can
    have. So it is taken at prices p >= 0 of the sinks, for which weak duality gives

        least = max_p sum_i min_m (c[i, m] + p[m]) - sum_m capacity[m] p[m]

    and of two prices the better: 0, and those that make the mean cost of all sinks equal.
    """
    group = cluster.devices_per_node if cluster.num_nodes > 1 else 1
    near_IM = sum(x.reshape(len(x), -1, group).sum(axis=2) for x in traffic.exchanges)
    cost_IM = np.sum(near_IM, axis=1, keepdims=True) - near_IM
    room_M = capacity.reshape(-1, group).sum(axis=1)
    mean_M = cost_IM.mean(axis=0)
    bounds = [
        float((cost_IM + price_M).min(axis=1).sum() - room_M @ price_M)
        for price_M in (np.zeros_like(mean_M), mean_M.max() - mean_M)
    ]
    return Locality(blind=float((cost_IM @ room_M).sum() / room_M.sum()), least=max(bounds))
