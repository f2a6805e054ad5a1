"""The homes that LUFFY gives the samples of one step after one layer: what plans are judged by and runs carry out.

Legend: I samples of a step; D devices.
"""

import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...profilers.cluster import Cluster, Link
from .. import netmoe
from ..arrays import Floats, Ints
from ..compiled import seconds_to_compile
from ..netmoe.bottleneck import Channels, rows_of
from ..netmoe.rehoming import rounds
from ..outcome import ROUNDING, Objective, Outcome
from .attention import Attention, Law, deal
from .bound import least_seconds, padded_optimum
from .growth import growth

METHODS = ("joint", "paper")


def rehome(
    method: str,
    copies_ID: NDArray[np.integer],
    pairs_I: NDArray[np.integer],
    cluster: Cluster,
    attention: Attention,
    *,
    next_copies: Floats | None = None,
    copy_bytes: float | None = None,
    bounded: bool = True,
) -> netmoe.Rehomed:
    """The homes of a step's samples after a layer; equal on all ranks that give equal arguments.

    Parameters
    ----------
    method
        "joint": moves and swaps until none shortens attention and exchanges together, then kicks; "paper": Algorithm 1,
        corrected.
    attention
        That of the samples at their new homes.

    Others, and what is returned, as in `netmoe.rehome`.

    Notes
    -----
    "joint" starts from NetMoE's even homes, and from homes that balance attention alone (the padded optimum where
    batches are padded, else dealt by cost); the better end is kicked, and the best counts, of

        t = max_d A_d + sum over exchanges of their busiest port's seconds                                          (1)
    """
    started, channels = time.perf_counter(), Channels.of(cluster, copy_bytes)
    following_ID = None if next_copies is None else np.asarray(next_copies)
    if channels.name != "exchange_s":
        raise UsageError("attention weighed against exchanges without seconds; expected links, and the bytes of a copy")
    traffic = netmoe.Traffic(copies_ID.astype(np.float64), following_ID)
    places_D = attention.places(cluster.num_devices)
    if method == "paper":
        home_I = growth(traffic.units, attention, cluster.num_devices)
    else:
        even_I = _even(traffic.units, pairs_I, cluster.devices_per_node)
        padded = attention.law.batches == "padded"
        alone_I = _padded_start(traffic, attention, places_D) if padded else deal(attention.cost, places_D)
        starts = [even_I, alone_I] if attention.follows else [even_I]
        home_I = _shortened(traffic, np.array(starts), places_D, channels, attention)
    value = _seconds(traffic, attention, home_I, channels)
    bound = least_seconds(traffic, attention, places_D, channels, value=value).seconds if bounded else None
    outcome = Outcome.of(
        objective=Objective("layer_s", value, "min"),
        bound=bound,
        bound_kind=None if bound is None else "linear programme",
        proven=bound is not None and value <= bound * (1 + ROUNDING),
        started=started,
    )
    return netmoe.Rehomed(home_I, (outcome,), None)


def first_homes(method: str, attention: Attention, start: Ints, num_devices: int) -> Ints:
    """The homes of a step's samples before the first layer, `[I]`: those that balance attention alone, as nothing is
    routed yet; by the paper's method where they start, `[I]`.
    """
    if method == "paper":
        return start
    places_D = attention.places(num_devices)
    if attention.law.batches == "padded":
        return padded_optimum(attention.cost, places_D)[1]
    return deal(attention.cost, places_D)


def compile_rehoming(cluster: Cluster) -> float:
    """Compile what re-homes samples on such a cluster, or load it; the seconds that took, none without a compiler."""
    links = {kind: Link(1e-6, 1e-10) for kind in ("intra", "inter")[: 1 + (cluster.num_nodes > 1)]}
    small = cluster.at_most(3, 3)
    small = replace(small, links={**links, **small.links})
    copies_ID = np.arange(4 * small.num_devices**2).reshape(-1, small.num_devices) % 7
    tokens_I = 1 + np.arange(len(copies_ID)) % 5
    attention = Attention(Law(0.0, 1e-6, 1e-9), tokens_I, tokens_I**2)
    pairs_I, following_ID = copies_ID.sum(axis=1), copies_ID / 2
    return seconds_to_compile(
        lambda: rehome(
            "joint", copies_ID, pairs_I, small, attention, next_copies=following_ID, copy_bytes=1.0, bounded=False
        )
    )


def _seconds(traffic: netmoe.Traffic, attention: Attention, home_I: Ints, channels: Channels) -> float:
    """The time of homes, (1)."""
    return float(attention.seconds(home_I, channels.cluster.num_devices).max()) + channels.total(traffic, home_I)


def _shortened(
    traffic: netmoe.Traffic, starts_SI: Ints, places_D: Ints, channels: Channels, attention: Attention
) -> Ints:
    """The homes that moves and swaps reach from starts."""
    from ..netmoe.state import Held
    from ..netmoe.swaps import shorten

    size = channels.cluster.num_devices
    held = Held(
        np.append(attention.cost, 0.0),
        np.append(attention.kind, -1),
        np.append(attention.tokens, 0),
        attention.start_s,
        attention.call_s,
        attention.law.batches == "padded",
        places_D,
        attention.room(size),
    )
    group, alpha_C, beta_C = channels.cluster.devices_per_node, channels.alpha, channels.beta
    return shorten(rows_of(traffic), starts_SI, group, alpha_C, beta_C, held)[1]


def _even(units: Ints, pairs: NDArray[np.integer], devices_per_node: int) -> Ints:
    """NetMoE's even homes `[I]`: in rounds, the longest first, one a device in each, where least is sent."""
    size, home_I = units.shape[1], np.zeros(len(units), np.int64)
    for at in rounds(pairs, size):
        home_I[at] = netmoe.two_stages(units[at], np.ones(size, np.int64), devices_per_node)
    return home_I


def _padded_start(traffic: netmoe.Traffic, attention: Attention, places_D: Ints) -> Ints:
    """Homes with the least padded attention, its batches where their copies are."""
    from scipy.optimize import linear_sum_assignment

    _, batch_I = padded_optimum(attention.cost, places_D)
    units_BD = np.zeros((len(places_D), len(places_D)), np.int64)
    np.add.at(units_BD, batch_I, traffic.units)
    return np.asarray(linear_sum_assignment(units_BD, maximize=True)[1][batch_I], np.int64)
