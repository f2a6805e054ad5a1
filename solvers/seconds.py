"""The closed forms of a layer's seconds: attention, dispatch, experts, combine and, where tokens stay, K and V.

Every part waits for its busiest rank or port, every layer for the part before it (no overlap; a pipeline changes that):

    layer_s = attention_s + kv_s + dispatch_s + experts_s + combine_s                                           (1)

A curve gives the seconds of one call from its sizes, with the fit's error as `low` and `high`. Both are carried through
with all curves low, or all high, together: for a sum wider than independent errors would be, for a difference of sums
of several curves too narrow, so whoever subtracts keeps the parts.

Legend: B steps; L MoE layers; C link classes; D devices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..profilers.cluster import Cluster
from ..profilers.fits.fit import Prediction
from .arrays import Bools, Floats, Ints
from .ports import ALONE, Busiest, Sharing, link_classes, num_peers

Curve = Callable[[Floats], Prediction]  # bytes through the busiest port in one direction -> seconds
Curve2 = Callable[[Floats, Floats], Prediction]
Curve3 = Callable[[Floats, Floats, Floats], Prediction]


def exchange_seconds(
    copies: NDArray[np.number],
    copy_bytes: float,
    curves: Sequence[Curve3],
    kept: Ints | int = 0,
    *,
    shared: Sharing = ALONE,
) -> list[Prediction]:
    """Seconds of one dispatch or combine in each link class, `[B, L]` each; the `slowest` is the whole.

    Parameters
    ----------
    copies
        Hidden vectors that leave (0) and reach (1) each device by link class, `[B, L, C, 2, D]`.
    copy_bytes
        Of a hidden vector.
    curves
        Of the all-to-all over bytes through the busiest port, bytes of the busiest device, kept ones included, and the
        mean port's part of the busiest one's; one a link class.
    kept
        Hidden vectors that each device sends itself, `[B, L, 1, 1, D]`.
    shared
        How devices of a node share its link, by which n_c below is found.

    Notes
    -----
    The classes work side by side, and the busiest port of each decides. The three dispatch models differ only in where
    a combine's copies go (`ports.combined_at`): to the old home, to the first expert's device, or to the next home.

        t = max_c t_c,        t_c = curve_c(b n_c, b (n_c + max_{d, direction} (n_cd + k_cd) - max_{d, direction} n_cd),
                                            mean_{d, direction} n_cd / n_c)
        n_c = max_{d, direction} n_cd, or where devices of a node share its link `Sharing.busiest`               (2)

    with n the copies and b the bytes of each. What a device sends itself counts once: k_cd is that of device d for the
    first class, which joins the devices of a node where it has several, 0 for another. A class without n and k takes no
    time.
    """
    return port_seconds(shared.busiest(copies, kept), copy_bytes, curves)


def port_seconds(busiest: Busiest, copy_bytes: float, curves: Sequence[Curve3]) -> list[Prediction]:
    """Seconds of an exchange in each link class, `[B, L]` each, of what decides them, `[B, L, C]`, as (2)."""
    port_BLC, most_BLC = (copy_bytes * n.astype(np.float64) for n in (busiest.port, busiest.port + busiest.beside))
    evenness_BLC = np.broadcast_to(busiest.evenness, port_BLC.shape)
    found = [curve(port_BLC[..., c], most_BLC[..., c], evenness_BLC[..., c]) for c, curve in enumerate(curves)]
    return [only_where(most_BLC[..., c] > 0, seconds) for c, seconds in enumerate(found)]


def encoded_rows(copies: NDArray[np.number], kept: Ints) -> NDArray[Any]:
    """Hidden vectors that the busiest device encodes and decodes in an exchange, the mean of both, `[B, L]`.

    Copies are `[B, L, C, 2, D]`, those that devices send themselves `[B, L, 1, 1, D]`: rows are encoded whole, wherever
    they go.
    """
    rows_BL: NDArray[Any] = (copies.sum(axis=2).mean(axis=2) + kept[:, :, 0, 0]).max(axis=2)
    return rows_BL


def expert_seconds(pairs: Ints, slots: Ints, curve: Curve2) -> Prediction:
    """Seconds of the experts, `[B, L]`.

    Parameters
    ----------
    pairs
        Token-expert pairs of each device, `[B, L, D]`.
    slots
        Experts of each device, `[D]`.
    curve
        Of the expert FFN over (pairs, experts on the device).

    Notes
    -----
    The busiest device among those of as many experts s decides; one without pairs takes no time.

        t = max_s ffn(max_{d: slots[d] = s} pairs[d], s)                                                        (3)
    """
    found = []
    for width in np.unique(slots[slots > 0]).tolist():
        busiest_BL = pairs[:, :, slots == width].max(axis=2).astype(np.float64)
        seconds = curve(np.maximum(busiest_BL, 1), np.full(busiest_BL.shape, float(width)))
        found.append(only_where(busiest_BL > 0, seconds))
    return slowest(found)


def attention_seconds(tokens: Ints, contexts: Ints, curve: Curve3, calls: Ints | None = None) -> Prediction:
    """Seconds of attention, `[B, L]`.

    Parameters
    ----------
    tokens
        On each device before the layer, `[B, L, D]`.
    contexts
        The sum over these tokens of 2 p + 1, p the token's position in its sample, `[B, L, D]`.
    curve
        Of causal attention over (batch, length, calls).
    calls
        In which they attend, `[B, L, D]`; None: one on each device.

    Notes
    -----
    sum_{p < L} (2 p + 1) = L^2: over whole samples of lengths L_i, tokens n = sum L_i and contexts c = sum L_i^2, and
    the equal samples

        batch = n^2 / c,        length = c / n                                                                  (4)

    keep both: exact for c0 + c1 B L + c2 B L^2. A token alone (coherent: where it sits; decoded: after its context) has
    its own share of its sample's L^2.
    """
    held_BLD = np.maximum(tokens, 1).astype(np.float64)
    over_BLD = np.maximum(contexts, 1).astype(np.float64)
    calls_BLD = np.ones(tokens.shape) if calls is None else np.maximum(calls, 1).astype(np.float64)
    seconds = curve(held_BLD**2 / over_BLD, over_BLD / held_BLD, calls_BLD)  # (4)
    return _reduced(only_where(tokens > 0, seconds), lambda x: x.max(axis=2))


def folding_seconds(rows: Ints, pairs: Ints, curve: Curve3, *, trains: bool) -> Prediction:
    """Seconds of finding rows that stand for others, and of folding them, `[B, L]`.

    Parameters
    ----------
    rows
        Copies of each device before, `[B, L, D]`.
    pairs
        Of these that are compared, a row and itself too, `[B, L, D]`.
    curve
        Over (rows, rows that each is compared with in the mean, 1 with a backward pass and 0 without).
    trains
        Whether a backward pass follows.

    Notes
    -----
    The slowest device decides; one that compares none takes no time.
    """
    each = np.maximum(pairs / np.maximum(rows, 1), 1.0)
    seconds = curve(np.maximum(rows, 1).astype(np.float64), each, np.full(rows.shape, float(trains)))
    return _reduced(only_where(pairs > 0, seconds), lambda x: x.max(axis=2))


def gather_seconds(
    tokens: NDArray[np.number], kv_bytes: float, cluster: Cluster, curves: Sequence[Curve]
) -> list[Prediction]:
    """Seconds of gathering K and V of all tokens on every device, in each link class, `[B, L]` each.

    Parameters
    ----------
    tokens
        On each device before the layer, `[B, L, D]`.
    kv_bytes
        Of K and V of a token in one layer.
    curves
        Of the all-gather over bytes through the busiest port, one a link class.

    Notes
    -----
    A device sends its tokens to every peer of a class; the classes work side by side. No device receives more than the
    fullest one sends, so that with n_cd that leave device d

        t = max_c t_c,    t_c = curve_c(kv_bytes n_c),    n_c = max_d n_cd, or as (2) where devices share a link
        n_cd = tokens[d] peers_c                                                                                (5)

    Where a link is shared, devices that have less make up for one that has more, as on the CPU; where rows are padded
    to the most of any device, as over NCCL, they do not.
    """
    ways = [tokens * num_peers(one, tokens.shape[2], cluster.devices_per_node) for one in link_classes(cluster)]
    port_BLC = Sharing.of(cluster).busiest(np.stack(ways, axis=2)[..., None, :]).port
    return [curve(kv_bytes * port_BLC[..., c].astype(np.float64)) for c, curve in enumerate(curves)]


def total(parts: Sequence[Prediction]) -> Prediction:
    """The sum of parts `[B, L]` that follow one another, (1), `[B, L]`."""
    return functools.reduce(lambda a, b: _joined(np.add, a, b), parts)


def step_seconds(layers: Prediction, num_layers: int) -> Prediction:
    """The sum over the layers `[B]` of seconds `[B, L]`, or `[B, 1]` where all layers take the same."""
    return _reduced(layers, lambda x: x.mean(axis=1) * num_layers)


def scaled(factor: float | NDArray[Any], part: Prediction) -> Prediction:
    """A prediction, `[B, L]`, times a factor: a number, or an array that broadcasts."""
    return Prediction(factor * part.seconds, factor * part.low, factor * part.high, part.extrapolated)


def no_seconds(shape: tuple[int, ...]) -> Prediction:
    """Seconds of a part that is not called: zeros of this shape, such as `[B, L]`."""
    return Prediction(np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=bool))


def slowest(parts: Sequence[Prediction]) -> Prediction:
    """The longest of parts `[B, L]` that run side by side, `[B, L]`."""
    return functools.reduce(lambda a, b: _joined(np.maximum, a, b), parts)


def _joined(how: np.ufunc, a: Prediction, b: Prediction) -> Prediction:
    return Prediction(
        how(a.seconds, b.seconds), how(a.low, b.low), how(a.high, b.high), np.asarray(a.extrapolated | b.extrapolated)
    )


def _reduced(seconds: Prediction, how: Callable[[Floats], Any]) -> Prediction:
    """Every level reduced alike; extrapolated where anything within was."""
    flagged = how(seconds.extrapolated.astype(np.float64)) > 0
    return Prediction(how(seconds.seconds), how(seconds.low), how(seconds.high), np.asarray(flagged))


def only_where(busy: Bools, seconds: Prediction) -> Prediction:
    """Seconds `[B, L]` where a part is `busy` `[B, L]`, elsewhere 0."""
    return Prediction(seconds.seconds * busy, seconds.low * busy, seconds.high * busy, seconds.extrapolated & busy)
