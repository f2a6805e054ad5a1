"""Curves of exchanges: seconds by the bytes of the busiest port, from what was measured of round trips, or from links.

Legend: N nodes; P ranks of a collective.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from ...errors import InputError
from ...profilers.cases.routed_exchange import node_shares
from ...profilers.cluster import Cluster
from ...profilers.fits.fit import Prediction
from ...profilers.predictor import predicted
from ...profilers.series import Series
from ...solvers.arrays import Floats
from ...solvers.ports import LinkClass
from ...solvers.seconds import Curve, Curve3, only_where, scaled, total

COUNT_BYTES = 8  # of an int64
APART = 0.05  # of two evennesses at least, for the time between them to be more than noise


def half_trip(series: Series, places: int, shared_by: float, moves: int = 0) -> Curve3:
    """Half of a dispatch and a combine, over bytes of the busiest port and of the busiest device, and how even it is.

    Parameters
    ----------
    places
        Nodes N of the exchange between nodes; of one inside a node its P ranks.
    shared_by
        As `Sharing` has it: how many times as fast a device is alone.
    moves
        1 where tokens live elsewhere afterwards.

    Notes
    -----
    With t_e a round trip as uneven as measured ones, whose mean port has a part e of the busiest port's bytes, and t_1
    an even one that keeps the least part measured, k, an exchange whose mean port has a part x takes half of

        t_e(s, h) + w (t_1(s, k) - t_e(s, k)),        w = (x - e) / max(1 - e, `APART`) limited to 0 to 1       (1)

    Profiles of earlier versions have no t_1: w is 0.
    """
    assert series.fit is not None
    if "kept" not in series.fit.axes:
        raise InputError(
            f"the profile's {series.key} does not tell how much ranks keep, as earlier versions measured it;"
            " measure again: moeplan profile"
        )
    measured, (least, _) = Measured.of(series.ranks, places, shared_by), series.fit.measured["kept"]
    knows_even = series.fit.measured.get("even") == (0, 1)  # an interrupted profile may lack the even ones

    def least_kept(sent: Floats, even: int) -> Prediction:
        return scaled(0.5, _trip(series, 0, sent / (1 - least / 100), least, even))

    def curve(port: Floats, most: Floats, evenness: Floats) -> Prediction:
        """Seconds of one way, `[B, L]`."""
        parts = [_one_way(series, moves, port * measured.uneven, most - port)]
        weight = np.clip((evenness - measured.evenness) / max(1 - measured.evenness, APART), 0.0, 1.0)
        if knows_even and weight.any():
            ends = (weight, least_kept(port * measured.even, 1)), (-weight, least_kept(port * measured.uneven, 0))
            parts += [scaled(factor, only_where(weight > 0, end)) for factor, end in ends]
        return total(parts)  # (1)

    return curve


@dataclass(frozen=True, slots=True)
class Measured:
    """Exchanges of P ranks as they were measured."""

    #: uneven, even: bytes that the busiest rank sent for each byte that decides how long it took
    uneven: float
    even: float
    evenness: float  #: Of uneven ones, as `Busiest` has it

    @classmethod
    def of(cls, ranks: int, places: int, shared_by: float) -> Self:
        """Those over so many places.

        Of the P - 1 other ranks P - P / N are on other nodes: so much of a port's bytes crosses between nodes. Where a
        device alone is f times as fast, what was measured counts by the larger of a port's part 1 / f, and the mean
        part of a device of the busiest node (`Sharing.busiest`).
        """
        even, (busiest, mean) = (ranks - 1) / (ranks - ranks / places), node_shares(ranks, places)
        uneven = even if shared_by == 1 else 1 / max(1 / (shared_by * even), busiest)
        return cls(uneven, even, mean * uneven)


def _one_way(series: Series, moves: int, sent: Floats, beside: Floats) -> Prediction:
    """Half of a round trip whose busiest rank sends so many bytes and keeps so many beside, `[B, L]` each.

    Notes
    -----
    With s bytes sent, h handled in all, one at least, and k = 1 - s / h limited to the parts measured, an exchange is
    timed that sends s:

        t = t(s / (1 - k), k)                                                                                   (1)

    Below the least part measured, that of even copies, it copies more than there is. Above the largest one, K, it
    copies less, and is flagged as extrapolated: there t is the line through the times of h with the least and the
    largest part, taken on to 1 - s / h, but no less than (1) and no more than t(h, K), which sends too much.
    """
    assert series.fit is not None
    handled = np.maximum(sent + beside, 1.0)
    least, largest = series.fit.measured["kept"]
    kept = 100 * (1 - sent / handled)
    within = np.clip(kept, least, largest)
    beyond = np.maximum(kept - largest, 0) / max(largest - least, 1)
    sends = _trip(series, moves, sent / (1 - within / 100), within)
    if not beyond.any():
        return Prediction(sends.seconds / 2, sends.low / 2, sends.high / 2, sends.extrapolated)
    ends = _trip(series, moves, handled, least), _trip(series, moves, handled, largest)
    levels = {}
    for name in ("seconds", "low", "high"):
        floor, fewer, more = (getattr(one, name) for one in (sends, *ends))
        levels[name] = np.where(beyond > 0, np.clip(more + beyond * (more - fewer), floor, more), floor) / 2
    over = np.rint(kept) > largest  # parts were measured in whole percents
    return Prediction(**levels, extrapolated=sends.extrapolated | over)


def _trip(series: Series, moves: int, handled: Floats, kept: Floats | float, even: int = 0) -> Prediction:
    """A round trip of which the busiest rank handles so many bytes and keeps so many percent of them."""
    assert series.fit is not None
    size: dict[str, Floats | float] = {"bytes": np.maximum(handled, 1.0), "kept": kept, "moves": moves, "even": even}
    return predicted(series, {axis: size[axis] for axis in series.fit.axes})


def agreement_seconds(even: Series | None) -> tuple[float, float]:
    """Seconds in which ranks exchange their counts: of copies, and where tokens move on also of sums.

    By the even all-to-all of as many bytes: one int64 to each of P ranks, and 2 P to each.
    """
    if even is None:
        return 0.0, 0.0
    of_copies, of_sums = predicted(even, {"bytes": COUNT_BYTES * np.array([even.ranks, 2 * even.ranks**2])}).seconds
    return float(of_copies), float(of_copies + of_sums)


def by_port(curve: Curve) -> Curve3:
    """A curve over bytes through the busiest port `[B, L]`, whatever devices send themselves and the others send."""
    return lambda port, _most, _even: curve(port)


def of_buffers(series: Series, places: int) -> Curve:
    """Seconds over bytes through a port, `[B, L]`, by the even exchange whose buffer sends as much: port x P / (P - 1).

    Between nodes, (N - 1) / N of a buffer crosses, hence N for P; in whole blocks, of at least one byte.
    """

    def curve(port: Floats) -> Prediction:
        blocks = np.ceil(np.maximum(port, 1.0) * places / (places - 1) / series.ranks)
        return predicted(series, {"bytes": blocks * series.ranks})

    return curve


def of_link(cluster: Cluster, kind: LinkClass) -> Curve:
    """Seconds over bytes through a port, `[B, L]`: the link's latency, and its seconds a byte."""
    link = cluster.links[kind]

    def curve(port: Floats) -> Prediction:
        seconds = link.latency_s + link.s_per_byte * port
        return Prediction(seconds, seconds, seconds, np.zeros(port.shape, dtype=bool))

    return curve
